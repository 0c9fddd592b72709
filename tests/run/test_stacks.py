"""Requests and answers as files: partial answers and answers to earlier requests do not count."""

from pathlib import Path

import pytest

from hpcrun.run.stacks import Frame, Mailbox, Reply, Stack, Thread


@pytest.fixture
def mail(tmp_path: Path) -> Mailbox:
    return Mailbox(tmp_path / "run" / "logs" / "7" / "restart-0", 2)


def prepared(mail: Mailbox) -> Mailbox:
    mail.logs.parents[2].mkdir(exist_ok=True)
    for task in range(2):
        mail.prepare(task)
    return mail


def test_an_answer_survives_writing_and_reading(mail: Mailbox) -> None:
    word = prepared(mail).ask()
    thread = Thread("MainThread", (Frame("a.py", 3, "<module>"), Frame("b\udcff.py", 9, "loss")))
    reply = Reply(word, 1, "node2", (Stack(1, "node2", 40, (thread,), 7, "training", 2.5),))
    mail.reply(reply)
    assert mail.asked() == word
    (found,) = mail.replies(word).values()
    assert found.stacks[0].threads[0].frames[0] == thread.frames[0]
    assert (found.task, found.stacks[0].step, found.stacks[0].idle) == (1, 7, 2.5)


def test_earlier_or_partial_answers_do_not_count(mail: Mailbox) -> None:
    first = prepared(mail).ask()
    mail.reply(Reply(first, 0, "node1"))
    second = mail.ask()
    assert first != second
    mail.answer(1).write_text('{"id": "' + second)
    assert mail.replies(second) == {}


def test_a_deleted_run_is_not_recreated(mail: Mailbox) -> None:
    word = prepared(mail).ask()
    mail.logs.parents[2].rename(mail.logs.parents[3] / "elsewhere")
    with pytest.raises(FileNotFoundError):
        mail.reply(Reply(word, 0, "node1"))
    with pytest.raises(FileNotFoundError):
        mail.prepare(0)
    assert not mail.logs.exists()


def test_files_are_removed_at_the_end_but_not_answers(mail: Mailbox) -> None:
    for task in range(2):
        prepared(mail).remove(task)
    mail.remove(0)
    with pytest.raises(FileNotFoundError):
        mail.ask()
    assert not mail.folder.exists()
    prepared(mail).ask()
    mail.remove(0)
    assert mail.answer(0).exists()


def test_ranks_of_large_jobs_poll_less_often(tmp_path: Path) -> None:
    assert (Mailbox(tmp_path, 8).pause, Mailbox(tmp_path, 1000).pause) == (1.0, 20.0)
