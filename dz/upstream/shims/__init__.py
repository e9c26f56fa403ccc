"""Declared stand-ins for what code written for transformers 4.x uses and the installed release no longer has.

`table.SHIMS` is the list: what each stands for, why it is safe, which releases had it. `needs.needed` says which of
them a repository needs, by reading; `apply.loading` puts those in for that repository's code and no other."""
