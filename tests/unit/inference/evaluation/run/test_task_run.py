"""Asking all samples: order, concurrency, progress, failures."""

import signal
import threading
import time
from pathlib import Path

import pytest

from inference.evaluation.options import EvaluationOptions, LambadaOptions
from inference.evaluation.run.preparation import prepare_task
from inference.evaluation.run.task_run import run_task
from inference.evaluation.task import EvaluationError, RetryableError
from inference.evaluation.tasks.lambada import Lambada


def run(passages: Path, model, *, concurrency: int = 4, progress=lambda *_: None):
    task = Lambada(EvaluationOptions(data_dir=Path(), lambada=LambadaOptions(passages)))
    return run_task(prepare_task(task), model, concurrency=concurrency, progress=progress)


def test_metrics_and_predictions_cover_all_samples_in_order(passages, model):
    found = run(passages, model)
    assert [each.index for each in found.predictions] == [0, 1, 2, 3]
    assert {metric.name: metric.value for metric in found.report.metrics} == {
        "lambada_last_word": 0.25,
        "lambada_last_token": 0.5,
        "lambada_perplexity": pytest.approx(2.718281828459045 ** ((2 + 3 + 2 + 2) * 0.5 / 4)),
        "lambada_token_perplexity": pytest.approx(2.718281828459045**0.5),
    }


def test_half_a_surrogate_pair_in_an_answer_is_replaced(passages, model):
    model.continuations["She opened the garden"] = ("\ud83d",)
    answers = [each.answer for each in run(passages, model).predictions]
    assert "".join(answers).encode()


def test_requests_are_kept_in_flight_up_to_the_limit(passages, model):
    run(passages, model, concurrency=2)
    assert model.most_in_flight == 2


def test_every_request_is_counted_and_timed(passages, model):
    found = run(passages, model)
    # Four a sample, and one more where the text of the last word was right.
    assert found.report.requests.count == len(model.requests) == 17
    assert found.report.requests.latency.min_ms >= 2.0


def test_requests_of_a_task_itself_are_part_of_its_time(passages, model, monkeypatch):
    monkeypatch.setattr(Lambada, "start", lambda _: time.sleep(0.5))
    assert run(passages, model).report.seconds >= 0.5


def test_progress_shows_the_accuracy_so_far(passages, model):
    reported: list[tuple[str, int, int]] = []
    run(passages, model, progress=lambda *state: reported.append(state))
    assert [done for _, done, _ in reported] == [0, 1, 2, 3, 4]
    assert reported[-1][0] == "lambada last_word 25.0% last_token 50.0%"


def test_a_failed_sample_fails_the_run_and_is_named(passages, model):
    model.refuses.add("She opened the garden")
    with pytest.raises(EvaluationError, match="1 of 4 samples could not be evaluated") as caught:
        run(passages, model)
    assert "sample 2: refused 'She opened the garden'" in str(caught.value)


def test_the_same_reason_is_reported_once(passages, model):
    model.refuses.update({"She opened the garden", "He had lost his"})
    model.reason = "the server is gone"
    with pytest.raises(EvaluationError, match="samples 2, 3: the server is gone"):
        run(passages, model)


def test_a_dead_server_ends_the_run_early(tmp_path, fake_model):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"text": "passage number {n}"}}\n' for n in range(500)))
    model = fake_model(unavailable=True)
    with pytest.raises(EvaluationError, match="and 15 more: refused"):
        run(path, model)
    assert len(model.requests) < 100


def test_an_error_in_the_task_is_not_taken_for_a_failed_request(passages, model):
    def broken(prompt: str, **options: object) -> str:
        raise ZeroDivisionError

    model.complete_text = broken
    with pytest.raises(ZeroDivisionError):
        run(passages, model)


def test_an_interrupt_ends_the_requests_that_wait_to_be_sent_again(passages, model, monkeypatch):
    def lost(*_, **__):
        raise RetryableError("connection refused", after_s=30.0, is_lost=True)

    def interrupt():
        time.sleep(0.5)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(model, "_request", lost)
    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(passages, model)
    assert time.monotonic() - began < 10
