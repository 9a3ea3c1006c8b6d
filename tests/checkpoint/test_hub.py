import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from deepinfer.checkpoint import hub
from deepinfer.errors import ConfigError
from model_configs import NANO


def test_no_model_means_the_bundled_one():
    assert hub.resolve(None).resolve() == NANO.resolve()
    assert (hub.resolve(None) / "config.json").is_file()


def test_existing_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert hub.resolve(tmp_path) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("owner/name") == Path("owner/name")


@pytest.mark.parametrize("model", ["/no/such/folder", "./missing", "name", "a/b/c", "owner/", "../x/y", "a b/c"])
def test_what_is_neither_folder_nor_hub_id_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder, and it is no hub id"):
        hub.resolve(model)


def test_file_is_refused_with_what_is_wanted(tmp_path: Path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="a file; it must be the folder"):
        hub.resolve(tmp_path / "model.safetensors")


def test_hub_id_downloads_only_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def download(hub_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(hub_id=hub_id, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolve("owner/name", "v1") == tmp_path
    assert asked == {"hub_id": "owner/name", "revision": "v1", "patterns": ["*.json", "*.safetensors"]}
    hub.resolve("owner/name", config_only=True)
    assert asked["patterns"] == ["*.json"]


def test_offline_mode_and_empty_cache_say_what_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="model is 'owner/name': there is no such folder, and the hub gave no such"):
        hub.resolve("owner/name")


def test_cached_model_is_found_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cached = tmp_path / "models--owner--name"
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert hub.resolve("owner/name").samefile(snapshot)


def test_hub_library_is_loaded_for_hub_ids_only():
    code = "import sys; from deepinfer.checkpoint.hub import resolve; resolve(None)"
    code += "; print('huggingface_hub' in sys.modules)"
    environment = {"PYTHONPATH": str(NANO.parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "False"
