"""Converts images, texts and tables for loggers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from leyden.core.errors import ConfigurationError, kind_of

GAP = 2
"""Pixels between two images of a grid."""


def listed(items: Any, what: str) -> list[Any]:
    """Returns items of "image", "audio" or "video" as a list, splitting a four-dimensional batch of images.

    Raises:
        ConfigurationError: if `items` is a single item. The rows of a single image would be logged as images.
    """
    if isinstance(items, list | tuple) or (what == "image" and getattr(items, "ndim", 0) == 4):
        return list(items)
    raise ConfigurationError(f"log_{what} takes a list, not {kind_of(items)}. Call log_{what}(key, [{what}]).")


def for_each(options: Mapping[str, Any], count: int, what: str) -> list[dict[str, Any]]:
    """Transposes options that hold one value per item into one dict of options per item.

    Example:
        >>> for_each({"caption": ["a", "b"]}, 2, "image")
        [{'caption': 'a'}, {'caption': 'b'}]

    Raises:
        ConfigurationError: if an option is not a list, or its length is not `count`.
    """
    for name, values in options.items():
        if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
            raise ConfigurationError(
                f"log_{what} got {name}={values!r}. Pass a list with one {name} per {what}, {count} in total."
            )
        if len(values) != count:
            raise ConfigurationError(
                f"log_{what} got {count} {what}s but {len(values)} values for {name}. Pass one value per {what}."
            )
    return [{name: values[index] for name, values in options.items()} for index in range(count)]


def as_pixels(image: Any) -> tuple[Any, str]:
    """Returns an image (or the one at a path) as a tensor or array, and its layout: "HW", "CHW" (tensors) or "HWC"."""
    if isinstance(image, str | os.PathLike):
        from PIL import Image

        with Image.open(image) as opened:
            return as_pixels(opened)
    pixels = _tensor(image) if isinstance(image, Tensor) else _array(image)
    if pixels.ndim not in (2, 3):
        raise ConfigurationError(
            f"log_image got an image of shape {tuple(pixels.shape)}. Pass two dimensions, or three with channels."
        )
    return pixels, "HW" if pixels.ndim == 2 else "CHW" if isinstance(image, Tensor) else "HWC"


def _tensor(image: Tensor) -> Tensor:
    """Returns the image in a dtype that TensorBoard reads correctly: uint8, or a float from 0 to 1."""
    image = image.detach()
    if image.is_floating_point():
        # NumPy does not support bfloat16.
        return image.float()
    return image.to(torch.uint8) * 255 if image.dtype == torch.bool else image.clamp(0, 255).to(torch.uint8)


def _array(image: Any) -> Any:
    """Like `_tensor`, for an array or a PIL image."""
    import numpy

    if hasattr(image, "getbands"):
        image = image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
    array = numpy.asarray(image)
    if array.dtype == bool:
        return array.astype("uint8") * 255
    return array if array.dtype.kind == "f" else array.clip(0, 255).astype("uint8")


def as_grid(images: Sequence[tuple[Any, str]]) -> Any:
    """Returns images, each with its layout, as one array (H, W, C) of bytes, with about as many rows as columns.

    Smaller images and the last row are filled up with black.
    """
    import numpy

    arrays = [(pixels.cpu().numpy() if isinstance(pixels, Tensor) else pixels, layout) for pixels, layout in images]
    cells = [_as_bytes(array, *layout) for array, layout in arrays]
    columns = math.ceil(math.sqrt(len(cells)))
    height, width, channels = (max(cell.shape[axis] for cell in cells) for axis in range(3))
    rows = math.ceil(len(cells) / columns)
    grid = numpy.zeros((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, channels), dtype="uint8")
    for index, cell in enumerate(cells):
        top, left = index // columns * (height + GAP), index % columns * (width + GAP)
        place = grid[top : top + cell.shape[0], left : left + cell.shape[1]]
        # Of images with and without transparency, the latter are opaque.
        place[:] = 255
        place[..., : cell.shape[2]] = cell
    return grid


def _as_bytes(pixels: Any, *axes: str) -> Any:
    """Returns an array with these axes as bytes (H, W, C), with three or four channels."""
    if "C" in axes:
        pixels = pixels.transpose([axes.index(axis) for axis in "HWC"])
    else:
        pixels = pixels.transpose([axes.index(axis) for axis in "HW"])[..., None]
    if pixels.dtype.kind == "f":
        pixels = (pixels * 255).clip(0, 255).astype("uint8")
    return pixels.repeat(3, axis=2) if pixels.shape[2] == 1 else pixels


def rows_of(
    columns: Sequence[str] | str | None, data: Sequence[Sequence[Any]] | None, dataframe: Any
) -> tuple[list[str] | None, list[list[Any]]]:
    """Returns the column names (None if unnamed) and the rows of a table.

    Example:
        >>> rows_of("a text alone", None, None)
        (['text'], [['a text alone']])
    """
    if dataframe is not None:
        return [str(name) for name in dataframe.columns], [list(row) for row in dataframe.itertuples(index=False)]
    if isinstance(columns, str):
        if data is not None:
            raise ConfigurationError(f"columns={columns!r} must be a list for a table. Use columns=[{columns!r}].")
        return ["text"], [[columns]]
    return None if columns is None else list(columns), [list(row) for row in data or ()]


def as_markdown(columns: Sequence[str] | None, rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table as Markdown.

    Example:
        >>> print(as_markdown(["input", "output"], [["1 | 2", 3]]))
        | input | output |
        | --- | --- |
        | 1 \\| 2 | 3 |
    """
    width = max((len(row) for row in rows), default=0)
    header = list(columns) if columns is not None else [""] * width
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
