"""Text and images to the inputs of Acorn."""

from transformers.image_utils import make_flat_list_of_images
from transformers.processing_utils import ProcessorMixin


class AcornProcessor(ProcessorMixin):
    """Each image placeholder in the text becomes as many of them as the image has tokens."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, image_token="<|image|>", **kwargs):
        self.image_token = image_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def validate_inputs(self, images=None, text=None, **kwargs):
        super().validate_inputs(images=images, text=text, **kwargs)
        texts = [text] if isinstance(text, str) else list(text or [])
        wanted = sum(t.count(self.image_token) for t in texts)
        given = len(make_flat_list_of_images(images)) if images is not None else 0
        if wanted != given:
            raise ValueError(f"the text has {wanted} image placeholders, but {given} images were given")

    def replace_image_token(self, image_inputs, image_idx, **kwargs):
        """The placeholders of one image."""
        rows, columns = (int(n) for n in image_inputs["image_grid_hw"][image_idx])
        return self.image_token * (rows * columns // self.image_processor.merge_size**2)


__all__ = ["AcornProcessor"]
