"""Compare lm-eval on a run, served and exported: python scripts/bench/tasks.py RUN TEXT

Needs `pip install 'lm_eval[api,hf]'`, in this environment or in another one whose `bin` is in PATH.
Makes three tasks from a text: choose the true continuation of a passage among four; bits per byte;
repeat the end of a passage. lm-eval's `hf` model does them on the export of the run, and its
`local-completions` on `gptmini serve`, once for each type of weights. The table gives their
metrics, then how each differs from the first: the largest differences between log-likelihoods, for
how many choices both agree whether the model would say them greedily, and how many texts are the
same.

--questions FILE adds a task of JSON lines with `query`, `choices` and `gold`, the number of the
right choice; with --n 0 it is the only one. --models names those to run.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve import find_free_port, start_server

import gptmini

TASKS = ("continuation", "passages", "repetition")
SEED = 1
N_CHOICES = 4
CONTEXT_WORDS, CHOICE_WORDS = 40, 8
# Passages for bits per byte. The long one does not fit a context, so it is read in windows.
PASSAGE_WORDS = [250, 250, 250, 250, 2500]
GENERATED_TOKENS = 24
N_REQUESTS, BATCH_SIZE = 4, 4  # requests at a time, and texts in each
GPTMINI = [sys.executable, "-m", "gptmini"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass
class Found:
    """The results of lm-eval for a model."""

    metrics: dict[tuple[str, str], float]  # of each task and metric
    answers: dict[tuple[str, int], list[Any]]  # of each task and document, as it logs them
    seconds: float


def write_task(folder: Path, name: str, documents: list[dict[str, Any]], **fields: Any) -> None:
    """Write a task of lm-eval and its documents; JSON is YAML, too."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        **fields,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task, indent=2))


def list_metrics(*names: str) -> list[dict[str, str]]:
    return [{"metric": name} for name in names]


def write_tasks(text: str, folder: Path, n_questions: int) -> list[str]:
    """Write three tasks made from a text; return their names."""
    dice = random.Random(SEED)  # noqa: S311
    words = text.split()

    def draw_passage(n_words: int) -> list[str]:
        start = dice.randrange(max(1, len(words) - n_words))
        return words[start : start + n_words]

    questions = []
    for _ in range(n_questions):
        passage = draw_passage(CONTEXT_WORDS + CHOICE_WORDS)
        choices = [" ".join(draw_passage(CHOICE_WORDS)) for _ in range(N_CHOICES)]
        answer = dice.randrange(N_CHOICES)
        choices[answer] = " ".join(passage[CONTEXT_WORDS:])
        context = " ".join(passage[:CONTEXT_WORDS])
        questions.append({"context": context, "choices": choices, "answer": answer})
    write_task(
        folder,
        "continuation",
        questions,
        output_type="multiple_choice",
        doc_to_text="{{context}}",
        doc_to_choice="choices",
        doc_to_target="answer",
        metric_list=list_metrics("acc", "acc_norm"),
    )

    passages = [{"text": " ".join(draw_passage(n_words))} for n_words in PASSAGE_WORDS]
    write_task(
        folder,
        "passages",
        passages,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=list_metrics("bits_per_byte", "word_perplexity"),
    )

    repetitions = []
    for _ in range(n_questions):
        passage = draw_passage(CONTEXT_WORDS + CHOICE_WORDS)
        beginning = " ".join(passage[:CONTEXT_WORDS])
        prompt = f"{' '.join(passage)}\n{beginning}"
        repetitions.append({"prompt": prompt, "end": " ".join(passage[CONTEXT_WORDS:])})
    options = {"until": ["\n"], "max_gen_toks": GENERATED_TOKENS, "temperature": 0}
    strip = {"function": "regex", "regex_pattern": r"(\S.*\S|\S)"}
    write_task(
        folder,
        "repetition",
        repetitions,
        output_type="generate_until",
        doc_to_text="{{prompt}}",
        doc_to_target="{{end}}",
        generation_kwargs=options,
        filter_list=[{"name": "strip", "filter": [strip, {"function": "take_first"}]}],
        metric_list=list_metrics("exact_match"),
    )
    return list(TASKS)


def write_questions(path: Path, folder: Path) -> str:
    """Write the task of a file of questions; return its name."""
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    write_task(
        folder,
        path.stem,
        documents,
        output_type="multiple_choice",
        doc_to_text="{{query.strip()}}\nAnswer:",
        doc_to_choice="choices",
        doc_to_target="gold",
        metric_list=list_metrics("acc", "acc_norm"),
    )
    return path.stem


def export_run(run: str, folder: Path) -> None:
    """Export a run; leave out its `max_new_tokens`, which transformers puts before a task's."""
    command = [*GPTMINI, "export", run, "--out", str(folder)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text())
    del config["max_new_tokens"]
    path.write_text(json.dumps(config))


def run_lm_eval(model: str, arguments: dict[str, Any], tasks: list[str], folder: Path) -> Found:
    """Let lm-eval do the tasks in `folder` with a model, and read what it writes."""
    command = ["lm_eval", "--model", model, "--tasks", ",".join(tasks)]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    command += ["--include_path", str(folder), "--batch_size", str(BATCH_SIZE), "--log_samples"]
    command += ["--device", "cpu"]
    environment = {**os.environ, **OFFLINE, "HF_DATASETS_CACHE": str(folder / "datasets")}
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        subprocess.run(
            [*command, "--output_path", out], env=environment, stdout=subprocess.DEVNULL, check=True
        )
        seconds = time.perf_counter() - started
        (results,) = Path(out).rglob("results_*.json")
        metrics: dict[tuple[str, str], float] = {}
        for task, values in json.loads(results.read_text())["results"].items():
            for key, value in values.items():
                name = key.split(",")[0]
                if isinstance(value, float) and not name.endswith("_stderr"):
                    metrics[task, name] = value
        answers: dict[tuple[str, int], list[Any]] = {}
        for task in tasks:
            (samples,) = Path(out).rglob(f"samples_{task}_*.jsonl")
            for line in samples.read_text().splitlines():
                sample = json.loads(line)
                answers[task, sample["doc_id"]] = [answer for (answer,) in sample["resps"]]
    return Found(metrics, answers, seconds)


@dataclass
class Comparison:
    """How the answers of two models differ."""

    choices: float = 0.0  # the largest difference between two log-likelihoods of a choice, nats
    passages: float = 0.0  # and of a whole passage
    greedy: list[bool] = field(default_factory=list)  # for each choice: the same is_greedy
    texts: list[bool] = field(default_factory=list)  # for each text: the same


def compare_answers(found: Found, reference: Found) -> Comparison:
    comparison = Comparison()
    assert found.answers.keys() == reference.answers.keys()
    for (task, document), answers in found.answers.items():
        for answer, other in zip(answers, reference.answers[task, document], strict=True):
            if task == "repetition":
                comparison.texts.append(answer == other)
            elif task == "passages":
                difference = abs(float(answer) - float(other))
                comparison.passages = max(comparison.passages, difference)
            else:
                difference = abs(float(answer[0]) - float(other[0]))
                comparison.choices = max(comparison.choices, difference)
                comparison.greedy.append(answer[1] == other[1])
    return comparison


def print_table(found: dict[str, Found]) -> None:
    """Print a row for each metric, and the comparison of each model with the first."""
    reference, *others = found.values()

    def print_row(*cells: str) -> None:
        print(f"| {' | '.join(cells)} |", flush=True)

    print_row("", *found)
    print(f"|---|{'---|' * len(found)}")
    for task, name in reference.metrics:
        values = [each.metrics[task, name] for each in found.values()]
        print_row(f"{task}: {name}", *(f"{value:.6g}" for value in values))
    compared = [compare_answers(each, reference) for each in others]
    print_row("difference of a choice, nats", "", *(f"{each.choices:.1e}" for each in compared))
    print_row("difference of a passage, nats", "", *(f"{each.passages:.1e}" for each in compared))
    for title, flags in (
        ("greedy alike", [each.greedy for each in compared]),
        ("same text", [each.texts for each in compared]),
    ):
        print_row(title, "", *(f"{sum(each)} of {len(each)}" for each in flags))
    print_row("seconds", *(f"{each.seconds:.0f}" for each in found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("text", type=Path)
    parser.add_argument("--models", default="hf,float32,bfloat16", help="hf, and weights served")
    parser.add_argument("--n", type=int, default=50, help="questions, and texts to repeat")
    parser.add_argument("--questions", type=Path, action="append", default=[])
    options = parser.parse_args()
    context_length = gptmini.load(options.run, "cpu").context_length
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks = write_tasks(options.text.read_text(), folder, options.n) if options.n else []
        tasks += [write_questions(path, folder) for path in options.questions]
        export = folder / "hf"
        export_run(options.run, export)
        found: dict[str, Found] = {}
        for model in options.models.split(","):
            # local-completions sends one token less than its `max_length` and hf one more than its
            # own, so these read the same windows.
            if model == "hf":
                arguments = {
                    "pretrained": export,
                    "dtype": "float32",
                    "max_length": context_length - 2,
                }
                found["hf, float32"] = run_lm_eval("hf", arguments, tasks, folder)
                continue
            port = find_free_port()
            command = [*GPTMINI, "serve", options.run, "--port", str(port)]
            with start_server([*command, "--weights", model], port) as (url, _):
                arguments = {
                    "model": export,
                    "base_url": f"{url}/v1/completions",
                    "tokenizer_backend": "huggingface",
                    "max_length": context_length,
                    "num_concurrent": N_REQUESTS,
                }
                answers = run_lm_eval("local-completions", arguments, tasks, folder)
            found[f"served, {model}"] = answers
    print_table(found)


if __name__ == "__main__":
    main()
