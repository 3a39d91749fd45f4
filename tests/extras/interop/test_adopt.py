"""What a tokenizer.json of another model says of its tokens, and what a new model makes of it."""

from pathlib import Path
from typing import Any

import pytest

from gptmini.errors import DataError
from gptmini.extras.interop.adopt import adopt_tokenizer
from gptmini.runs.directory import RunDirectory
from gptmini.tokenizer.foreign import ForeignTokenizer
from gptmini.tokenizer.load import find_tokenizer, load_tokenizer
from tests.foreign import ADDED, MAKERS, TEXT, learn, tokenizers
from tests.support import SMALL


def adopt(library: Any, **more: Any) -> ForeignTokenizer:
    options = {"end_tokens": ["</s>"], "bos_token": "<s>"} | more
    return adopt_tokenizer(
        library.to_str(), Path("tokenizer.json"), **{"vocab_size": 2000} | options
    )


def test_the_first_token_is_what_the_file_says(capfd):
    library = MAKERS["Llama 2"]()
    ours = adopt(library)
    assert (ours.adds_bos, ours.eos_token_id, ours.end_tokens) == (True, 1, [2, 1])
    assert ours.add_bos(ours.encode("It was").tolist()) == library.encode("It was").ids
    assert adopt(MAKERS["GPT-2"]()).add_bos([5]) == [5]
    assert not capfd.readouterr().err
    library.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    assert adopt(library).add_bos([5]) == [1, 5]
    assert capfd.readouterr().err.count("</s>") == 1


def test_a_document_ends_with_a_special_token():
    library = MAKERS["GPT-2"]()
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        adopt(library, end_tokens=[700, "x", None], bos_token=None)
    library.add_special_tokens(["<|endoftext|>"])
    ours = adopt(library)
    assert ours.eos_token_id == library.token_to_id("<|endoftext|>")
    assert ours.end_tokens == [2, ours.eos_token_id]


def test_the_model_may_have_more_tokens_and_lack_special_ones():
    library = MAKERS["GPT-2"]()
    size = library.get_vocab_size()
    larger = adopt(library, vocab_size=size + 9)
    assert larger.decode_token(size + 8) == b""
    assert len(larger.compute_byte_lengths()) == size + 9
    smaller = adopt(library, vocab_size=size - len(ADDED))  # as Gemma 3 lacks its image
    with pytest.raises(DataError, match="<think>"):
        smaller.encode("a<think>b")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        adopt(library, vocab_size=size - 100)


def test_a_new_model_takes_a_file_as_it_came_and_its_run_keeps_it(gptmini, text_file: Path):
    library = MAKERS["GPT-2"]()
    file = Path("folder/tokenizer.json")
    file.parent.mkdir()
    library.save(str(file))
    for name in ("folder", str(file)):
        assert find_tokenizer(name).fingerprint == load_tokenizer(file).fingerprint
    ours = load_tokenizer(file)
    assert ours.vocab_size == library.get_vocab_size()
    assert ours.encode(TEXT).tolist() == library.encode(TEXT, add_special_tokens=False).ids
    train = ["train", "--data", str(text_file), "--set", f"tokenizer.kind={file}", *SMALL]
    assert gptmini(*train)[0] == 0
    file.unlink()
    assert load_tokenizer(Path("runs/text/tokenizer.json")).fingerprint == ours.fingerprint
    assert load_tokenizer(Path("runs/text/tokenizer.json")).file == library.to_str(pretty=True)
    assert gptmini("generate", "runs/text", "--prompt", "a", "--max-new-tokens", "2")[0] == 0


def test_a_file_without_end_of_text_takes_a_usual_one_or_says_what_is_missing(tmp_path: Path):
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "</s>": 1}, []))
    library.decoder = tokenizers.decoders.Fuse()
    file = tmp_path / "tokenizer.json"
    library.save(str(file))
    with pytest.raises(DataError, match=r"tokenizer.json: no token ends a document; add"):
        load_tokenizer(file)
    library.add_special_tokens(["</s>"])
    library.save(str(file))
    assert load_tokenizer(file).end_tokens == [1]


def test_a_tokenizer_that_drops_white_space_trains_and_generates(gptmini, text_file: Path):
    library = learn(
        tokenizers.models.WordPiece(unk_token="[UNK]"),
        tokenizers.trainers.WordPieceTrainer(
            vocab_size=300, show_progress=False, special_tokens=["[UNK]", "</s>"]
        ),
        pre_tokenizer=tokenizers.pre_tokenizers.BertPreTokenizer(),
        decoder=tokenizers.decoders.WordPiece(),
    )
    library.save("bert.json")
    words = ["--set", "tokenizer.kind=bert.json", *SMALL]
    code, _, err = gptmini("train", "--data", text_file.name, *words)
    assert (code, err.count("drops spaces and line breaks")) == (0, 1), err
    start = RunDirectory(Path("runs/text")).load_config().sample.start
    assert start.strip()
    for more in ([], ["--set", 'sample.start=" "']):
        code, _, err = gptmini("generate", "runs/text", *more)
        assert code == 0, err
