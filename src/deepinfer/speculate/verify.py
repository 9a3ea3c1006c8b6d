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


def count_tokens(token_ids: Int32, is_usable: Bool, num_lines: Int32, drafts: Int32) -> Int32:
    """Tokens that each row keeps [rows] int32: one more than its accepted drafts.

    token_ids, is_usable: [lines] what was drawn after the newest token and after each checked draft,
        row after row. num_lines: [rows], 1 + checked drafts. drafts: [rows, most]; a row has checked the
        first num_lines - 1 of its line.
    A line that is not usable ends its row; it is the last that is kept.
    """
    most = int(num_lines.max(initial=1)) - 1
    if most == 0:
        return np.ones_like(num_lines)
    place = np.arange(most)
    places = (num_lines.cumsum() - num_lines)[:, None] + place
    agrees = np.zeros((len(num_lines), most + 1), dtype=np.bool_)
    drafted = agrees[:, :most]
    np.equal(token_ids.take(places, mode="clip"), drafts[:, :most], out=drafted)
    drafted &= is_usable.take(places, mode="clip")
    drafted &= place < num_lines[:, None] - 1
    num_tokens: Int32 = (1 + agrees.argmin(axis=1)).astype(np.int32)
    return num_tokens
