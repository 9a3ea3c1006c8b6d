"""`deepinfer eval`: exact match per skill on a skills file, and the loss of its reference completions.

*exact* is the share of records whose whole reference completion, thinking included, is what greedy
decoding writes. The loss is the mean over all tokens of the reference completions, in nats, each
predicted after the reference's own earlier tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.cli.common import add_engine_flags, open_llm, progress, read_text
from deepinfer.errors import ConfigError
from deepinfer.frontend.prompt import Prompt
from deepinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.llm import LLM

SCORING_THREADS = 16  # requests that wait for logits at the same time and so share steps
NANO_EVAL = Path(__file__).parents[1] / "data" / "deepinfer-nano" / "eval" / "eval.jsonl"


def add_command(commands: Any) -> None:
    """Add the command and its flags to the parser."""
    parser = commands.add_parser("eval", help="score a model on its skills file")
    parser.add_argument(
        "--file", help="records as JSONL; default: eval/eval.jsonl of the model, else the small model's"
    )
    parser.add_argument("--skills", metavar="NAME,...", help="only these skills")
    parser.add_argument("--limit", type=int, help="at most this many records of each skill")
    parser.add_argument("--loss", action=argparse.BooleanOptionalAction, default=True, help="also score the loss")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


@dataclass
class Record:
    """One line of the skills file, and what the model made of it."""

    id: str
    skill: str
    prompt_ids: list[int]
    completion_ids: list[int]
    images: list[str] = field(default_factory=list)  # data URLs, one for each image token of the prompt
    is_exact: bool = False
    loss: float | None = None  # nats, summed over the completion
    error: str | None = None


def run(args: argparse.Namespace) -> int:
    """Score the records and print the table, or the JSON object."""
    path = find_file(args)
    lines = select_lines(read_text(str(path)), args.skills, args.limit)
    started = time.monotonic()
    with open_llm(args) as llm:
        records = [make_record(line, llm) for line in lines]
        run_greedy(llm, records)
        if args.loss:
            score_losses(llm, records)
    report = summarise(records, read_card(path))
    report["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(report) if args.json else as_text(report))
    return 1 if report["errors"] else 0


def find_file(args: argparse.Namespace) -> Path:
    """The skills file that the flags mean."""
    if args.file:
        return Path(args.file)
    beside_model = Path(getattr(args, "model", "")) / "eval" / "eval.jsonl"
    return beside_model if beside_model.exists() else NANO_EVAL


def select_lines(text: str, skills: str | None, limit: int | None) -> list[dict[str, Any]]:
    """The records to run."""
    wanted = set(skills.split(",")) if skills else None
    records = [json.loads(line) for line in text.splitlines() if line.strip()]
    known = {record["skill"] for record in records}
    if wanted and wanted - known:
        raise ConfigError(
            f"--skills names {', '.join(sorted(wanted - known))}; the file has {', '.join(sorted(known))}"
        )
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit is {limit}; it must be at least 1")
    kept: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for record in records:
        skill = record["skill"]
        counts[skill] = counts.get(skill, 0) + 1
        if (wanted and skill not in wanted) or (limit and counts[skill] > limit):
            continue
        kept.append(record)
    return kept


def make_record(line: dict[str, Any], llm: LLM) -> Record:
    """A record with its token ids; prompts are rendered already, special tokens spelled out."""
    prompt_ids = llm.tokenizer.encode(line["prompt"])
    whole_ids = llm.tokenizer.encode(line["prompt"] + line["completion"])
    return Record(line["id"], line["skill"], prompt_ids, whole_ids[len(prompt_ids) :], images_of(line))


def images_of(line: dict[str, Any]) -> list[str]:
    """The data URLs of a record's request, in order."""
    contents = [message["content"] for message in line.get("request", {}).get("messages", [])]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def run_greedy(llm: LLM, records: Sequence[Record]) -> None:
    """Fill in `is_exact` by greedy generation, all records in one call."""
    params = [SamplingParams(temperature=0.0, max_tokens=len(record.completion_ids)) for record in records]
    outputs = llm.generate([prompt_of(record, record.prompt_ids) for record in records], params)
    for record, output in zip(records, outputs, strict=True):
        record.error = output.error
        record.is_exact = output.token_ids == record.completion_ids


def prompt_of(record: Record, token_ids: list[int]) -> Prompt:
    """These tokens of a record with its images."""
    return {"prompt_token_ids": token_ids, "images": record.images} if record.images else token_ids


def score_losses(llm: LLM, records: Sequence[Record]) -> None:
    """Fill in `loss` from the logits over prompt and reference completion, several records at a time."""

    def score(record: Record) -> float:
        logits = llm.score(prompt_of(record, record.prompt_ids + record.completion_ids))
        return completion_loss(logits[-len(record.completion_ids) - 1 : -1], record.completion_ids)

    healthy = [record for record in records if record.error is None]
    with ThreadPoolExecutor(SCORING_THREADS) as pool:
        for record, loss in zip(healthy, progress(pool.map(score, healthy), "loss", len(healthy)), strict=True):
            record.loss = loss


def completion_loss(logits: np.ndarray[Any, np.dtype[np.float32]], token_ids: Sequence[int]) -> float:
    """Summed negative log-probability of each token; logits: [len(token_ids), vocab] float32."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    chosen = wide[np.arange(len(token_ids)), np.asarray(token_ids)]
    return float((np.log(np.exp(wide).sum(axis=1)) - chosen).sum())


@dataclass(frozen=True)
class Card:
    """What the model card says: the ids of the records that are not exact, and the mean loss."""

    misses: frozenset[str]
    loss: float


def read_card(path: Path) -> Card | None:
    """The model card's scores, from report.json beside the skills file."""
    file = path.with_name("report.json")
    if not file.exists():
        return None
    report = json.loads(file.read_text())
    return Card(frozenset(report["misses"]), report["summary"]["loss"])


def summarise(records: Sequence[Record], card: Card | None) -> dict[str, Any]:
    """The whole result as one object; `card` holds the model card's figures for the same records."""
    scored = [record for record in records if record.loss is not None]
    num_tokens = sum(len(record.completion_ids) for record in scored)
    misses = {record.id for record in records if not record.is_exact}
    card_misses = card.misses & {record.id for record in records} if card else misses
    skills = sorted({record.skill for record in records})
    return {
        **exactness(records, card),
        "loss": sum(record.loss or 0.0 for record in scored) / num_tokens if num_tokens else None,
        "card_loss": card.loss if card else None,
        "skills": {name: exactness([record for record in records if record.skill == name], card) for name in skills},
        "misses": sorted(misses),
        "lost": sorted(misses - card_misses),
        "gained": sorted(card_misses - misses),
        "errors": {record.id: record.error for record in records if record.error},
    }


def exactness(records: Sequence[Record], card: Card | None) -> dict[str, Any]:
    """How many records, the share that is exact, and the share that the card says is."""
    return {
        "records": len(records),
        "exact": share(record.is_exact for record in records),
        "card": share(record.id not in card.misses for record in records) if card else None,
    }


def share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0


def as_text(report: dict[str, Any]) -> str:
    """The report as a table; `card` is the model card's figure for the same records."""
    lines = [f"{'skill':<20} {'records':>7} {'exact':>7} {'card':>7}"]
    for name, row in report["skills"].items():
        lines.append(f"{name:<20} {row['records']:>7} {row['exact']:>7.3f} {_figure(row['card'])}")
    lines.append(f"{'all':<20} {report['records']:>7} {report['exact']:>7.3f} {_figure(report['card'])}")
    if report["loss"] is not None:
        card_loss = _figure(report["card_loss"], 4).strip()
        lines.append(f"loss {report['loss']:.4f} nats a token; card: {card_loss}")
    for word in ("lost", "gained"):
        if report[word]:
            lines.append(f"{word} against the card: {', '.join(report[word])}")
    for name, error in report["errors"].items():
        print(f"{name}: {error}", file=sys.stderr)
    lines.append(f"{report['seconds']} s")
    return "\n".join(lines)


def _figure(value: float | None, digits: int = 3) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>7}"
