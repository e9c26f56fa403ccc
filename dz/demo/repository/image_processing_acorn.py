"""Images to patches, on PIL and numpy."""

import numpy as np
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs


class AcornImageProcessorKwargs(ImagesKwargs, total=False):
    r"""
    patch_size (`int`): side of a patch in pixels.
    merge_size (`int`): patches per side that become one token.
    """

    patch_size: int
    merge_size: int


class AcornImageProcessor(PilBackend):
    """Resizes to whole tokens without changing the proportions more than that takes, and cuts into patches.

    `pixel_values` [patches of all images, channels * patch_size^2], in rows from the top left of each image;
    `image_grid_hw` [images, 2], patches down and across."""

    valid_kwargs = AcornImageProcessorKwargs
    model_input_names = ["pixel_values", "image_grid_hw"]
    size = {"longest_edge": 128}
    default_to_square = False
    resample = PILImageResampling.BICUBIC
    do_convert_rgb = True
    do_resize = True
    do_rescale = True
    do_normalize = True
    image_mean = [0.5, 0.5, 0.5]
    image_std = [0.25, 0.25, 0.25]
    patch_size = 8
    merge_size = 2

    def grid(self, height: int, width: int, longest_edge: int) -> tuple[int, int]:
        """Patches down and across for an image of `height` x `width` pixels."""
        unit = self.patch_size * self.merge_size
        most = longest_edge // unit
        shrink = max(height, width, unit * most) / (unit * most)
        rows, columns = (min(most, max(1, round(side / shrink / unit))) for side in (height, width))
        return rows * self.merge_size, columns * self.merge_size

    def _preprocess(
        self, images, do_resize, size, resample, do_rescale, rescale_factor, do_normalize, image_mean, image_std,
        return_tensors=None, **kwargs,
    ):  # fmt: skip
        patches, grids, side = [], [], self.patch_size
        for image in images:
            rows, columns = self.grid(*image.shape[-2:], size.longest_edge)
            if do_resize:
                image = self.resize(image, size=SizeDict(height=rows * side, width=columns * side), resample=resample)
            if do_rescale:
                image = self.rescale(image, rescale_factor)
            if do_normalize:
                image = self.normalize(image, image_mean, image_std)
            cut = image.reshape(image.shape[0], rows, side, columns, side).transpose(1, 3, 0, 2, 4)
            patches.append(cut.reshape(rows * columns, -1).astype(np.float32))
            grids.append((rows, columns))
        data = {"pixel_values": np.concatenate(patches), "image_grid_hw": np.array(grids, dtype=np.int64)}
        return BatchFeature(data=data, tensor_type=return_tensors)


__all__ = ["AcornImageProcessor"]
