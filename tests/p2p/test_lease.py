"""The lease book: who may read what and how long, under late, repeated and unknown messages.

Field reports 2.2 (decode never comes), 2.3 (expiry under a reader's hands), 2.4 (messages for a
request that is gone), 3.7 (fan-in of unequal rank counts), 8.2 (an offer that is used twice).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvpp_connectors.p2p import lease as lease_module
from kvpp_connectors.p2p.lease import Ended, LeaseBook

SECONDS = 10.0
ID = "transfer"


def opened(readers: int = 1, now: float = 0.0) -> tuple[LeaseBook, int]:
    """A book with one lease that ``readers`` workers of D have opened; its generation."""
    book = LeaseBook(SECONDS)
    generation = book.grant(ID, "request", now)
    for _ in range(readers):
        assert book.open(ID, generation, "D", readers, now) is None
    return book, generation


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_the_last_confirmation_ends_the_lease_in_whatever_order(readers: int) -> None:
    """3.7: P frees after the last reader, not before, and once."""
    for order in itertools.permutations(range(readers)):
        book, generation = opened(readers)
        for reader in order:
            assert book.take_ended() == []
            assert book.confirm(ID, generation, "D", reader, 1.0) is None
        assert book.take_ended() == [Ended("request", "read")]
        assert book.take_ended() == []
        assert book.held == 0


def test_a_repeated_confirmation_counts_once_and_gets_the_same_answer() -> None:
    """2.4: the answer was lost and the reader asks again, before and after the lease's end."""
    book, generation = opened(readers=2)
    for _ in range(3):
        assert book.confirm(ID, generation, "D", 0, 1.0) is None
    assert book.held == 1
    assert book.confirm(ID, generation, "D", 1, 1.0) is None
    assert book.held == 0
    for reader in (0, 1, 0, 1):
        assert book.confirm(ID, generation, "D", reader, 1000.0) is None
    assert book.take_ended() == [Ended("request", "read")]
    assert book.counts == {"granted": 1, "read": 1, "released": 0, "expired": 0}


def test_who_has_confirmed_in_time_is_told_so_after_the_others_were_too_late() -> None:
    """2.3: reader 0 has the bytes although the lease expired for reader 1, who has not."""
    book, generation = opened(readers=2)
    assert book.confirm(ID, generation, "D", 0, 1.0) is None
    assert book.confirm(ID, generation, "D", 1, SECONDS) == "expired"
    assert book.confirm(ID, generation, "D", 0, SECONDS) is None
    assert book.confirm(ID, generation, "D", 1, SECONDS) == "expired"
    assert book.take_ended() == [Ended("request", "expired")]


def test_a_reader_that_does_not_exist_ends_nothing() -> None:
    """3.7: two confirmations are not two readers' if one of them is nobody."""
    book, generation = opened(readers=2)
    assert book.confirm(ID, generation, "D", 0, 1.0) is None
    assert book.confirm(ID, generation, "D", 2, 1.0) == "reader 2 of 2"
    assert book.held == 1


@pytest.mark.parametrize("message", ["open", "renew"])
def test_a_message_of_the_reader_renews_the_lease(message: str) -> None:
    """2.3: a decode engine that keeps renewing is not expired."""
    book, generation = opened()
    for now in range(1, 100):
        if message == "open":
            assert book.open(ID, generation, "D", 1, now * SECONDS * 0.99) is None
        else:
            assert book.renew(ID, generation, "D", now * SECONDS * 0.99) is None
        book.expire(now * SECONDS * 0.99)
    assert book.take_ended() == []


@pytest.mark.parametrize("by", ["expire", "open", "renew", "confirm", "release"])
def test_time_ends_a_lease_whoever_looks_first(by: str) -> None:
    """2.3: nothing that comes at the deadline or later finds the lease alive."""
    book, generation = opened()
    if by == "expire":
        book.expire(SECONDS)
    elif by == "open":
        assert book.open(ID, generation, "D", 1, SECONDS) == "expired"
    elif by == "renew":
        assert book.renew(ID, generation, "D", SECONDS) == "expired"
    elif by == "confirm":
        assert book.confirm(ID, generation, "D", 0, SECONDS) == "expired"
    else:
        book.release(ID, generation, "D", "late", SECONDS)
    assert book.take_ended() == [Ended("request", "expired")]
    assert book.confirm(ID, generation, "D", 0, SECONDS) == "expired"


def test_a_released_request_can_never_be_read_afterwards() -> None:
    """2.2: release is idempotent, and its pull is refused."""
    book, generation = opened()
    for _ in range(3):
        book.release(ID, generation, "D", "the client left", 1.0)
    assert book.take_ended() == [Ended("request", "released: the client left")]
    for answer in (
        book.open(ID, generation, "D", 1, 1.0),
        book.renew(ID, generation, "D", 1.0),
        book.confirm(ID, generation, "D", 0, 1.0),
    ):
        assert answer == "released: the client left"


def test_a_second_request_may_not_read_beside_the_first() -> None:
    """8.2: the second live use is refused, the first is unaffected, also by another count."""
    book, generation = opened(readers=2)
    assert book.open(ID, generation, "E", 2, 1.0) == "another decode request reads it"
    assert book.renew(ID, generation, "E", 1.0) == "another decode request reads it"
    assert book.confirm(ID, generation, "E", 0, 1.0) == "another decode request reads it"
    assert book.open(ID, generation, "D", 3, 1.0) == "its party has 2 readers, not 3"
    assert book.confirm(ID, generation, "D", 0, 1.0) is None
    assert book.confirm(ID, generation, "D", 1, 1.0) is None
    assert book.open(ID, generation, "E", 2, 1.0) == "read"
    assert book.confirm(ID, generation, "E", 0, 1.0) == "read"


@pytest.mark.parametrize("known_by", ["open", "renew"])
def test_a_release_ends_its_own_party_s_lease_only(known_by: str) -> None:
    """8.2: another engine was given the same offer, or a proxy gave up on a request that lives."""
    book = LeaseBook(SECONDS)
    generation = book.grant(ID, "request", 0.0)
    if known_by == "open":
        assert book.open(ID, generation, "D", 1, 0.0) is None
    else:
        assert book.renew(ID, generation, "D", 0.0) is None
    book.release(ID, generation, "E", "aborted there", 1.0)
    assert book.take_ended() == []
    book.release(ID, generation, "D", "aborted here", 1.0)
    assert book.take_ended() == [Ended("request", "released: aborted here")]


def test_anybody_may_release_what_nobody_has_claimed() -> None:
    """2.2: the proxy, whose client left before decode heard of the request."""
    book = LeaseBook(SECONDS)
    generation = book.grant(ID, "request", 0.0)
    book.release(ID, generation, "proxy", "the client left", 1.0)
    assert book.take_ended() == [Ended("request", "released: the client left")]


def test_a_confirmation_without_a_reader_is_refused() -> None:
    """2.4: nothing was opened, so nothing was read."""
    book = LeaseBook(SECONDS)
    generation = book.grant(ID, "request", 0.0)
    assert book.confirm(ID, generation, "D", 0, 1.0) == "confirmed without having been opened"
    assert book.held == 1


def test_a_message_for_another_generation_changes_nothing() -> None:
    """2.3, 2.7: the acknowledgement of an earlier life of the same request."""
    book, old = opened()
    assert book.confirm(ID, old, "D", 0, 1.0) is None
    new = book.grant(ID, "again", 2.0)
    assert new != old
    for _ in range(2):
        assert book.confirm(ID, old, "D", 0, 3.0) == f"generation {old} is over, {new} is on offer"
        book.release(ID, old, "D", "late", 3.0)
        assert book.renew(ID, old, "D", 3.0) is not None
        assert book.open(ID, old, "D", 1, 3.0) is not None
    assert book.held == 1
    assert book.take_ended() == [Ended("request", "read")]


def test_unknown_transfers_are_harmless() -> None:
    """2.4: a message for what was never here, or is long forgotten."""
    book = LeaseBook(SECONDS)
    assert book.open("?", 1, "D", 1, 0.0) == "unknown transfer"
    assert book.renew("?", 1, "D", 0.0) == "unknown transfer"
    assert book.confirm("?", 1, "D", 0, 0.0) == "unknown transfer"
    book.release("?", 1, "D", "why not", 0.0)
    assert (book.held, book.take_ended()) == (0, [])


def test_a_transfer_is_on_offer_once() -> None:
    """8.2: a second live lease of one transfer id would let the first one's blocks leak."""
    book = LeaseBook(SECONDS)
    book.grant(ID, "first", 0.0)
    with pytest.raises(ValueError, match=f"transfer {ID} is already on offer"):
        book.grant(ID, "second", 0.0)
    book.expire(SECONDS)
    assert book.take_ended() == [Ended("first", "expired")]


def test_memory_of_leases_that_are_over_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.4: the oldest are forgotten, and then unknown."""
    monkeypatch.setattr(lease_module, "_REMEMBERED", 3)
    book = LeaseBook(SECONDS)
    for number in range(5):
        generation = book.grant(f"t{number}", f"r{number}", 0.0)
        book.release(f"t{number}", generation, "D", "x", 0.0)
    answers = [book.renew(f"t{number}", number + 1, "D", 0.0) for number in range(5)]
    assert answers == ["unknown transfer"] * 2 + ["released: x"] * 3


@dataclass
class Offered:
    """What the model knows of one grant."""

    request: str
    deadline: float
    party: str | None = None  # whose it is
    readers: int | None = None  # its workers
    confirmed: set[int] = field(default_factory=set)
    over: bool = False  # read or released; the deadline is looked at beside
    let_go: bool = False  # its blocks may hold another request's KV


class Leases(RuleBasedStateMachine):
    """Messages in any order, late, repeated, of strangers, against a model of what may be said."""

    offers = Bundle("offers")  # (transfer id, generation)
    parties = st.sampled_from("DE")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.book = LeaseBook(SECONDS)
        self.model: dict[tuple[str, int], Offered] = {}

    @rule(target=offers, name=st.sampled_from("abc"))
    def grant(self, name: str) -> tuple[str, int]:
        """Grant, or be refused because the id is on offer."""
        request = f"request-{len(self.model)}"
        try:
            offer = name, self.book.grant(name, request, self.now)
        except ValueError:
            assert any(key[0] == name and not said.over for key, said in self.model.items())
            return name, 0  # a generation that never was
        assert offer not in self.model
        assert not any(self._alive(key) for key in self.model if key[0] == name)
        self.model[offer] = Offered(request, self.now + SECONDS)
        return offer

    @rule(offer=offers, party=parties, readers=st.integers(1, 3))
    def open(self, offer: tuple[str, int], party: str, readers: int) -> None:
        """Only one party reads, and only what is held."""
        known = self.model.get(offer)
        may = self._may(offer, party) and known and known.readers in (None, readers)
        assert (self.book.open(*offer, party, readers, self.now) is None) == bool(may)
        if known and may:
            known.party, known.readers, known.deadline = party, readers, self.now + SECONDS

    @rule(offer=offers, party=parties)
    def renew(self, offer: tuple[str, int], party: str) -> None:
        """Only what is held, and by nobody else."""
        may = self._may(offer, party)
        assert (self.book.renew(*offer, party, self.now) is None) == may
        if may:
            self.model[offer].party, self.model[offer].deadline = party, self.now + SECONDS

    @rule(offer=offers, party=parties, reader=st.integers(0, 3))
    def confirm(self, offer: tuple[str, int], party: str, reader: int) -> None:
        """Valid while the blocks are held; afterwards to nobody who has not been told so before."""
        valid = self.book.confirm(*offer, party, reader, self.now) is None
        known = self.model.get(offer)
        if known is None or known.readers is None or known.party != party:
            assert not valid
        elif self._alive(offer):
            assert valid == (reader < known.readers)
            known.confirmed |= {reader} if valid else set()
            known.over = len(known.confirmed) == known.readers
        else:
            newest = offer[1] == max(key[1] for key in self.model if key[0] == offer[0])
            assert valid == (newest and reader in known.confirmed)

    @rule(offer=offers, party=parties)
    def release(self, offer: tuple[str, int], party: str) -> None:
        """Legal at any time; another party's lease stays."""
        self.book.release(*offer, party, "rule", self.now)
        if self._may(offer, party):
            self.model[offer].over = True

    @rule(offer=consumes(offers))
    def lose(self, offer: tuple[str, int]) -> None:
        """A decode engine dies: nothing more is said about this offer."""

    @rule(seconds=st.sampled_from([0.0, 1.0, SECONDS / 2, SECONDS, 5 * SECONDS]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    @rule()
    def expire(self) -> None:
        """The endpoint's clock ticks: exactly the living are held."""
        self.book.expire(self.now)
        assert self.book.held == sum(map(self._alive, self.model))

    @rule()
    def take(self) -> None:
        """The scheduler frees blocks: of a lease that is over, once."""
        by_request = {said.request: offer for offer, said in self.model.items()}
        for ended in self.book.take_ended():
            offer = by_request[ended.request_id]
            known = self.model[offer]
            assert not self._alive(offer) and not known.let_go
            readers = known.readers or 1
            assert (ended.reason == "read") == (len(known.confirmed) == readers)
            known.let_go = True

    @invariant()
    def accounts(self) -> None:
        """Every lease is held or has ended, and ended in one way."""
        counts = self.book.counts
        ended = counts["read"] + counts["released"] + counts["expired"]
        assert counts["granted"] == self.book.held + ended == len(self.model)

    def teardown(self) -> None:
        """In the end every block is free, once."""
        self.now += 100 * SECONDS
        self.expire()
        self.take()
        assert all(known.let_go for known in self.model.values())

    def _may(self, offer: tuple[str, int], party: str) -> bool:
        """Whether it is held, and by nobody else."""
        return self._alive(offer) and self.model[offer].party in (None, party)

    def _alive(self, offer: tuple[str, int]) -> bool:
        known = self.model.get(offer)
        return known is not None and not known.over and known.deadline > self.now


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
