"""Which drafts a step accepts: those that equal the target's own draw, up to the first that does not.

Target and draft are drawn with the same noise of (seed, position), so a good draft equals the target's
draw whatever the temperature, and what is accepted is what the target would have drawn alone: a
request's text is the same with any number of drafts. With one-hot distributions this is greedy
verification. (Coupling by shared Gumbel noise: Daliri, Musco, Suresh, "Coupling without communication and
drafter-invariant speculative decoding", 2024, arXiv:2408.07978.)
"""

from __future__ import annotations

import numpy as np

from deepinfer.messages import Bool, Int32

NO_DRAFT = -1


def checked_drafts(drafts: Int32, num_lines: Int32, line_places: Int32) -> Int32:
    """The draft that is checked at each line [lines]; NO_DRAFT at the last one of each row.

    drafts: [rows, most], of which a row checks the first num_lines - 1. num_lines: [rows], 1 or more.
    line_places: [lines], 0 .. num_lines - 1 for each row.
    """
    rows = np.arange(len(num_lines)).repeat(num_lines)
    checked: Int32 = drafts[rows, np.minimum(line_places, drafts.shape[1] - 1)]
    checked[num_lines.cumsum() - 1] = NO_DRAFT
    return checked


def count_tokens(token_ids: Int32, is_usable: Bool, checked: Int32, offsets: Int32) -> Int32:
    """Tokens that each row keeps [rows] int32: one more than its accepted drafts.

    token_ids, is_usable: [lines] what was drawn after the newest token and after each checked draft, row after row,
        from offsets [rows] on. checked: [lines], see `checked_drafts`.
    A line that is not usable ends its row; it is the last that is kept.
    """
    ends = np.flatnonzero((token_ids != checked) | ~is_usable)
    return (ends[ends.searchsorted(offsets)] - offsets + 1).astype(np.int32)
