"""The Day-0 checklist on a served model: over HTTP, against upstream's own run, with a report that resumes."""
