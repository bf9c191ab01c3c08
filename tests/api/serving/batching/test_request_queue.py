"""Which texts make up the next batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.api.serving.batching.request_queue import QueuedText, RequestQueue


def text(length: int, *, group: str = "a") -> QueuedText[str, None]:
    return QueuedText(group, None, 0, [7] * length)


def queue_of(*texts: QueuedText[str, None]) -> RequestQueue[str, None]:
    queue: RequestQueue[str, None] = RequestQueue()
    for each in texts:
        queue.add(each)
    return queue


def lengths(batch: list[QueuedText[str, None]]) -> list[int]:
    return [len(each.tokens) for each in batch]


def test_the_oldest_text_comes_first_and_the_closest_lengths_follow() -> None:
    queue = queue_of(*(text(n) for n in (10, 50, 12, 9, 11)))
    assert lengths(queue.take(42)) == [10, 9, 11, 12]
    assert lengths(queue.take(42)) == [50]


def test_a_text_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    queue = queue_of(text(100), text(3))
    assert lengths(queue.take(64)) == [100]
    assert lengths(queue.take(64)) == [3]


def test_within_one_length_the_oldest_comes_first() -> None:
    first, second, third = text(5), text(5), text(5)
    queue = queue_of(first, second, third)
    assert queue.take(10) == [first, second]
    assert queue.take(10) == [third]


def test_a_removed_text_is_never_taken_and_frees_its_tokens() -> None:
    removed, kept = text(8), text(4)
    queue = queue_of(removed, kept)
    queue.remove(removed)
    queue.remove(removed)
    assert queue.tokens == 4
    assert queue.take(100) == [kept]
    assert not queue


def test_models_do_not_share_a_batch_and_the_oldest_text_decides_which_is_next() -> None:
    queue = queue_of(text(5, group="a"), text(5, group="b"), text(5, group="a"))
    assert [each.group for each in queue.take(100)] == ["a", "a"]
    assert [each.group for each in queue.take(100)] == ["b"]


def test_an_empty_queue_gives_an_empty_batch() -> None:
    assert queue_of().take(10) == []


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 80), st.data())
def test_every_text_is_taken_once_within_the_budget(
    sizes: list[int], budget: int, data: st.DataObject
) -> None:
    texts = [text(size, group=data.draw(st.sampled_from("ab"))) for size in sizes]
    queue = queue_of(*texts)
    removed = data.draw(st.sets(st.sampled_from(range(len(texts))))) if texts else set()
    for index in removed:
        queue.remove(texts[index])
    taken = []
    while batch := queue.take(budget):
        assert len(batch) == 1 or sum(lengths(batch)) <= budget
        assert len({each.group for each in batch}) == 1
        taken += batch
    expected = [each for index, each in enumerate(texts) if index not in removed]
    assert sorted(map(id, taken)) == sorted(map(id, expected))
    assert queue.tokens == 0
