"""Where a model's files are: a folder, the hub's cache, or the small model that ships with the package."""

from __future__ import annotations

import re
from pathlib import Path

from deepinfer.errors import ConfigError

BUNDLED = Path(__file__).parents[1] / "data" / "deepinfer-nano"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATTERNS = ("*.json", "*.safetensors")  # config, tokenizer, index and weights


def resolve(model: str | Path | None, revision: str | None = None, *, config_only: bool = False) -> Path:
    """The folder of a model: an existing one as it is, a hub id downloaded (or found in the hub's cache).

    None is the bundled small model. config_only: fetch no weights, only the JSON files.
    The hub library's own settings hold (cache folder, token, HF_HUB_OFFLINE).
    Raises ConfigError when there is no such folder and nothing to download.
    """
    if model is None:
        return BUNDLED
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(
            f"model is {str(model)!r}, a file; it must be the folder that holds config.json and the weights"
        )
    if not HUB_ID.fullmatch(str(model)):
        raise ConfigError(
            f"model is {str(model)!r}, but there is no such folder, and it is no hub id (owner/name); "
            "give a checkpoint folder or a hub id"
        )
    return _download(str(model), revision, PATTERNS[:1] if config_only else PATTERNS)


def _download(hub_id: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, needed for hub ids only
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(
            f"model is {hub_id!r}: there is no such folder, and the hub gave no such model{at} ({reason}); "
            "check the name, the network and HF_HUB_OFFLINE"
        ) from error
