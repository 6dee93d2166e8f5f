"""Pictures of a run: every image in its place, and the colour where the attention is."""

import numpy as np

from train.pictures import marked, sheet


def test_a_sheet_has_every_image_in_its_place_and_is_white_behind_the_last() -> None:
    images = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3, 1)
    found = sheet(images)
    assert found.shape == (4, 9, 3)
    for i, image in enumerate(images):
        y, x = i // 3 * 2, i % 3 * 3
        assert np.array_equal(found[y : y + 2, x : x + 3], np.broadcast_to(image, (2, 3, 3)))
    assert (found[2:, 6:] == 255).all()


def test_the_most_seen_patch_has_the_strongest_colour() -> None:
    images = np.full((1, 4, 6, 3), 100, np.uint8)
    maps = np.array([[[0.1, 0.0, 0.4], [0.0, 0.2, 0.0]]], np.float32)
    found = marked(images, maps).astype(int)
    redness = (found[..., 0] - found[..., 2])[0]
    assert np.array_equal(np.argsort(-redness[::2, ::2], axis=None)[:3], [2, 4, 0])
    assert redness[0, 2] == redness[2, 0] == 0 and (redness[:2, 4:] == redness[0, 4]).all()
