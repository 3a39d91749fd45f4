"""Brings a model of the Hugging Face Hub into the cache, by its name.

A name is OWNER/NAME; @REVISION after it is a branch, tag or commit, and /FILE.gguf one GGUF file
among several. Only the files that an import reads are downloaded: settings, tokenizer, chat
template, and weights in safetensors or GGUF. Pickles and code are not.
"""

import os
from dataclasses import replace
from pathlib import Path

from gptmini.console import say
from gptmini.data import hub
from gptmini.data.hub import HubName, Snapshot
from gptmini.errors import CheckpointError, shorten
from gptmini.extras.interop.gguf import import_gguf
from gptmini.extras.interop.huggingface import (
    INDEX_FILE,
    WEIGHTS_FILE,
    check_tokenizer_file,
    list_weight_files,
    read_settings,
)
from gptmini.tokenizer.foreign import import_library

SETTINGS_FILES = (
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def parse_model_name(source: str) -> HubName | None:
    """Parse the name of a model on the Hub, perhaps of a GGUF file in it; None for a path.

    Without `hf:`, whatever exists here is a path. Raises CheckpointError for a wrong name.
    """
    model = hub.parse_name(source.removeprefix(hub.PREFIX))
    if model is not None and model.path is not None and not model.path.lower().endswith(".gguf"):
        model = None
    if not source.startswith(hub.PREFIX):
        is_file = source.lower().endswith(".gguf") and source.count("/") < 2
        has_owner = model is not None and "/" in model.name
        if is_file or not has_owner or os.path.exists(source):
            return None
    if model is None:
        raise CheckpointError(
            f"{shorten(source)}: not a name on the Hub; write {hub.PREFIX}OWNER/NAME, "
            f"{hub.PREFIX}OWNER/NAME@REVISION or {hub.PREFIX}OWNER/NAME/FILE.gguf"
        )
    return model


def fetch_model(model: HubName) -> tuple[HubName, Path]:
    """Download what the cache lacks of a model.

    Returns its name with the commit as the revision, and its folder in the cache or its GGUF file.

    Raises CheckpointError for one that does not exist, may not be read or has no weights that can
    be imported, MachineError for trouble with the network or the disk and for a package that is
    missing. What cannot be imported is refused before its weights are downloaded, if that is known.
    """
    import_library()
    snapshot = hub.open_snapshot("model", model.name, model.revision)
    say(f"{hub.PREFIX}{model.name}: revision {snapshot.commit}")
    gguf_file = _choose_gguf_file(model, snapshot)
    fetched = replace(model, revision=snapshot.commit, path=gguf_file)
    if gguf_file is not None:
        import_gguf("GGUF files")
        (path,) = hub.download(snapshot, [gguf_file])
        return fetched, path
    settings = [name for name in (*SETTINGS_FILES, INDEX_FILE) if name in snapshot.files]
    hub.download(snapshot, settings)
    read_settings(snapshot.folder)
    check_tokenizer_file(snapshot.folder)
    weights = [WEIGHTS_FILE]
    if WEIGHTS_FILE not in snapshot.files:
        weights = list_weight_files(snapshot.folder)
    missing = [name for name in weights if name not in snapshot.files]
    if missing:
        raise snapshot.make_error(
            f"{missing[0]}: missing there, though {INDEX_FILE} names it; choose another revision"
        )
    hub.download(snapshot, weights)
    return fetched, snapshot.folder


def _choose_gguf_file(model: HubName, snapshot: Snapshot) -> str | None:
    """Choose the GGUF file to import; None if there are weights in safetensors.

    Raises CheckpointError if there is nothing to import, or several GGUF files to choose from.
    """
    gguf_files = [name for name in snapshot.files if name.lower().endswith(".gguf")]
    if model.path is not None:
        if model.path in snapshot.files:
            return model.path
        raise snapshot.make_error(f"has no file {model.path}; it has {hub.list_some(gguf_files)}")
    if INDEX_FILE in snapshot.files or WEIGHTS_FILE in snapshot.files:
        return None
    if len(gguf_files) == 1:
        return gguf_files[0]
    if gguf_files:
        raise snapshot.make_error(
            f"has {len(gguf_files)} GGUF files; choose one, as in "
            f"{hub.PREFIX}{model.name}/{gguf_files[0]} (it has {hub.list_some(gguf_files)})"
        )
    all_files = hub.list_some(snapshot.files)
    raise snapshot.make_error(
        f"has no weights in safetensors or GGUF (it has {all_files}); choose another, or write "
        f"them with transformers' save_pretrained"
    )
