"""NullEncoder: no embeddings, but the same bookkeeping, and checks of what a device would suffer from."""

from __future__ import annotations

from deepinfer.images.messages import EncodePlan, EncodeResult
from deepinfer.messages import StepPlan


class NullEncoder:
    """Knows which images are encoded. Broken invariants of the scheduler are AssertionErrors here."""

    def __init__(self) -> None:
        self._tokens: dict[bytes, int] = {}  # positions of each encoded image

    @property
    def num_tokens(self) -> int:
        """Positions of all images that are kept."""
        return sum(self._tokens.values())

    def execute(self, plan: EncodePlan) -> EncodeResult:
        """Drop and encode."""
        for key in plan.drops:
            del self._tokens[key]
        for image in plan.images:
            assert image.key not in self._tokens, "an image is encoded that is there already"
            self._tokens[image.key] = image.num_tokens
        return EncodeResult(tuple(image.key for image in plan.images), 0.0)

    def check(self, plan: StepPlan) -> None:
        """Assert that the step's images are encoded and lie in their rows as a whole."""
        for place in plan.images:
            start, count = int(plan.starts[place.row]), int(plan.counts[place.row])
            assert self._tokens.get(place.key) == place.num_tokens, "a step needs an image that is not encoded"
            assert start <= place.start and place.start + place.num_tokens <= start + count, "an image is cut"
