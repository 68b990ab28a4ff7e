"""Runs lm-eval's tasks on a model: lm-eval asks the questions and scores the answers, this module gives the answers.

Data sets come from the Hugging Face hub, or from files that the user's own tasks name.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.deploy.ship.evaluation import BATCH_TOKENS
from shoal.deploy.ship.generate import sampled
from shoal.deploy.ship.predictor import Predictor, check_vocabulary
from shoal.deploy.ship.scores import Score
from shoal.peer.data.labels import IGNORED
from shoal.peer.model.generate import Sampler
from shoal.protocol.errors import LocalError


def check_library() -> None:
    """Check that lm-eval is installed. Raises: LocalError: lm-eval is missing."""
    if importlib.util.find_spec("lm_eval") is None:
        raise LocalError("--tasks needs the lm-eval library: pip install lm-eval")


def task_scores(
    predictor: Predictor, tasks: Sequence[str], *, include: Path | None, limit: int, shots: int | None
) -> list[Score]:
    """Run tasks on a model, and return a score for each task and metric.

    Args:
        include: a folder with the user's own tasks, in addition to lm-eval's.
        limit: examples per task; 0: all.
        shots: solved examples before each question; None: the task's default.
    Raises: LocalError: there is no such task, or it cannot run; the text says why.
    """
    check_library()
    import lm_eval
    from lm_eval.tasks import TaskManager

    if include is not None and not include.is_dir():
        raise LocalError(f"there is no folder {include} with tasks")
    manager = TaskManager(include_path=None if include is None else str(include))
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise LocalError(f"lm-eval has no task {unknown[0]!r}: `lm-eval ls tasks` lists them, --include adds your own")
    try:
        found = lm_eval.simple_evaluate(
            model=_answering(predictor),
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit or None,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except LocalError:
        raise
    except Exception as error:  # data sets, the network or a task's code may raise anything
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise LocalError(f"lm-eval cannot run {', '.join(tasks)}: {reason}") from error
    return _scores(found)


def _scores(found: Mapping[str, Any]) -> list[Score]:
    scores = []
    for task, metrics in found["results"].items():
        examples = found.get("n-samples", {}).get(task, {}).get("effective")
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float) or not kind:
                continue
            stderr = metrics.get(f"{metric}_stderr,{kind}")
            scores.append(
                Score(
                    name=f"{task} {metric}" + ("" if kind == "none" else f" ({kind})"),
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, int | float) else None,
                    examples=examples,
                )
            )
    return scores


def _answering(predictor: Predictor) -> Any:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows

    class Answering(TemplateLM):  # type: ignore[misc]
        """Implements lm-eval's model interface with `predictor`."""

        @property
        def eot_token_id(self) -> int:
            return int(predictor.tokenizer.separator[-1])

        @property
        def prefix_token_id(self) -> int:
            return int((*predictor.tokenizer.separator, *predictor.tokenizer.beginning)[-1])

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            tokens: list[int] = predictor.tokenizer.encode([string], special=True)[0].tolist()
            begin = list(predictor.tokenizer.beginning)
            if add_special_tokens is not False and (not begin or tokens[: len(begin)] != begin):
                tokens = [*begin, *tokens]
            check_vocabulary(predictor, max(tokens, default=0), "a question")
            return tokens

        def _loglikelihood_tokens(
            self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            return _log_likelihoods(predictor, [(before, after) for _, before, after in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            found = []
            for request in requests:
                (text,) = request.args
                windows = get_rolling_token_windows(
                    self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, predictor.model.context, 1
                )
                pairs = [(given[: len(given) - len(asked) + 1], asked) for given, asked in windows]
                found.append(sum(value for value, _ in _log_likelihoods(predictor, pairs)))
            return found

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return [_written(predictor, self.tok_encode(prompt), how) for prompt, how in (one.args for one in requests)]

    return Answering()


def _log_likelihoods(
    predictor: Predictor, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[tuple[float, bool]]:
    """Return for each pair (context, asked tokens): (log-likelihood of the asked tokens in nats, True if each of them
    is the model's most likely token there). A pair longer than the model's context loses its first tokens."""
    T = predictor.model.context
    found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    rows = [([*before, *after][-(T + 1) :], min(len(after), T)) for before, after in pairs]
    order = sorted(range(len(pairs)), key=lambda i: (-len(rows[i][0]), i))
    at = 0
    while at < len(order):
        longest = max(1, len(rows[order[at]][0]) - 1)
        chosen = order[at : at + max(1, BATCH_TOKENS // longest)]
        at += len(chosen)
        tokens_BT = torch.zeros(len(chosen), longest, dtype=torch.int64)
        targets_BT = torch.full_like(tokens_BT, IGNORED)
        for row, i in enumerate(chosen):  # the padding after a row's end is not used
            tokens, num = rows[i]
            end = len(tokens) - 1
            tokens_BT[row, :end] = torch.tensor(tokens[:-1])
            targets_BT[row, end - num : end] = torch.tensor(tokens[len(tokens) - num :], dtype=torch.int64)
        value_BT, likeliest_BT = predictor.log_likelihoods(tokens_BT, targets_BT)
        for row, i in enumerate(chosen):
            found[i] = float(value_BT[row].sum()), bool(likeliest_BT[row].all())
    return found


def _written(predictor: Predictor, prompt: list[int], how: Mapping[str, Any]) -> str:
    """Generate text after `prompt`, and return it up to the task's first stop text, end token or token limit."""
    until = how.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    temperature = float(how.get("temperature") or 0.0) if how.get("do_sample") else 0.0
    num, text = int(how.get("max_gen_toks") or 256), ""
    # A prompt that leaves no room for the answer is cut at its beginning, as lm-eval's own models do.
    prompt = prompt[-max(1, predictor.model.context - num) :] or [int(predictor.tokenizer.separator[-1])]
    sampler = Sampler(temperature=temperature, seed=0)
    for part in sampled(predictor, prompt, num, sampler, {predictor.tokenizer.end_of_text}):
        text += part
        found = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
        if found:
            return text[: min(found)]
    return text
