"""The core with components against any order of events: the machine of the core's own test, and pools of tags for each
window and state. Prefill writes its part of the tails until it reports its last chunk, or has stopped.
"""

from __future__ import annotations

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from simulation.memory import Contents, SimulatedPool
from simulation.rig import Rig
from tests.support.component_stories import state, window
from tests.support.core_machine import CoreMachine, Sending
from tests.support.thorough import examples
from tidekv.states import commands, events
from tidekv.states.component_specs import Component
from tidekv.states.pages.page_pool import PageState
from tidekv.states.types import FULL, page_ids

PICKS = st.integers(min_value=0, max_value=99)
PAST = (b"ababab", b"abab", b"ababb", b"aba")


def is_of_components(wish: commands.Command) -> bool:
    if isinstance(wish, commands.QueryStorage):
        return bool(wish.components_first)
    is_one = isinstance(wish, commands.CopyPages | commands.FetchPages | commands.StorePages)
    return is_one and wish.component != FULL


SETS = st.sampled_from(
    [
        (window(2, 12, 6),),
        (state(5, 3),),
        (window(3, 9, 8), state(6, 5)),
        (window(1, 20, 20), state(20, 20)),
        (window(2, 3, 0), state(1, 0)),
    ]
)


class ComponentsMachine(CoreMachine):
    """After any events, component pages hold the right bytes when a request is ready, and none is lost."""

    @initialize(
        components=SETS,
        device_pages=st.sampled_from((10, 20)),
        host_pages=st.sampled_from((0, 8, 20)),
        others=st.booleans(),
        lookahead_pages_max=st.sampled_from((0, 5, 99)),
    )
    def begin(
        self,
        components: tuple[Component, ...],
        device_pages: int,
        host_pages: int,
        others: bool,
        lookahead_pages_max: int,
    ) -> None:
        self.rig = Rig(
            device_pages=device_pages,
            host_pages=host_pages,
            copy_run_pages=2,
            components=components,
            lookahead_pages_max=lookahead_pages_max,
        )
        self.contents = Contents()
        self.device = SimulatedPool(self.rig.core.state.device)
        self.host = SimulatedPool(self.rig.core.state.host)
        self.sent, self.fetched_tokens, self.prompts, self.left = set(), {}, {}, {}
        self.ready, self.reading, self.operations, self.sendings = {}, {}, [], []
        self.names = 0
        self.rig.attach_storage(component_pages=True)
        index = self.rig.core.state.components
        self.components = {component.name: component for component in components}
        self.pools = {("device", name): SimulatedPool(tier.pool) for name, tier in index.device.items()}
        self.pools |= {("host", name): SimulatedPool(tier.pool) for name, tier in index.host.items()}
        self.writing: dict[tuple[str, int], tuple[tuple[commands.ComponentPages, ...], bytes]] = {}
        self.finishes = 0
        # With others, they have put the component pages of the most frequent prompts there before.
        past = PAST if others else ()
        self.stored = {name: {self.component_tags(name, tokens)[-1] for tokens in past} for name in self.components}
        for component in components:
            if component.kind == "window":
                self.stored[component.name] |= {tag for tokens in past for tag in self.component_tags("window", tokens)}
        self.step, self.rig.step = self.rig.step, self.watch

    def component_tags(self, name: str, tokens: bytes) -> list[int]:
        """What a component's page at each position holds; of a window too it stands for all that is before."""
        return self.contents.tags(f"{name} of ", tokens, 1)

    def watch(self, event_type: type[events.Event], **fields: object) -> list[commands.Command]:
        """Apply to the component pages what an event reports, before the core takes the event."""
        key = (fields.get("request_id"), fields.get("generation"))
        if event_type is events.ChunkReceived and fields["last"] and fields["span"] == 0:
            self.end_writes(key, well=True)
        elif event_type is events.RoomDrained or (event_type is events.RoomFailed and fields["settled"]):
            self.end_writes(key, well=False)
        elif event_type in (events.FinishRequested, events.RetractRequested):
            fields["component_pages"] = self.generate(fields["request_id"], fields["keys"])
        return self.step(event_type, **fields)

    def end_writes(self, key: tuple[str, int], *, well: bool) -> None:
        component_pages, tokens = self.writing.pop(key, ((), b""))
        for tail in component_pages:
            tags = self.component_tags(tail.component, tokens)[tail.first :] if well else None
            self.pools["device", tail.component].end_write(tail.pages, key, tags)

    def generate(self, request_id: str, tokens: bytes) -> tuple[events.ComponentLeft, ...]:
        """Decode has gone on to the end of `tokens`: its window has moved, its record was written in place."""
        self.finishes += 1
        left = []
        for table in self.rig.request(request_id).component_pages.table:
            name, component = table.component, self.components[table.component]
            pool, tags, end = self.pools["device", name], self.component_tags(name, tokens), len(tokens)
            if component.kind == "state":
                pool.put(table.own[0], tags[-1], request_id)
                first, pages = end - 1, [table.own[0]]
            else:
                known = dict(enumerate(table.pages, table.first))
                first = max(0, end - component.window_tokens)
                unused = [page for page in table.own if page not in table.pages]
                for position in range(table.first + len(table.pages), end):
                    # What the window has left behind is written again.
                    out = [at for at in known if at < position - component.window_tokens and known[at] in table.own]
                    known[position] = unused.pop() if unused else known.pop(out[0])
                    pool.put(known[position], tags[position], request_id)
                pages = [known[position] for position in range(first, end)]
                pool.expect(page_ids(pages), tags[first:], request_id)
            if self.finishes % 5:
                left.append(events.ComponentLeft(name, first, tuple(pages)))
        return tuple(left)

    # --- What the core wishes ---

    def obey(self) -> None:
        for wish in self.rig.pending:
            if getattr(wish, "component", "") == FULL:
                continue
            if isinstance(wish, commands.CopyPages):
                source = self.pools[wish.source, wish.component]
                self.reading[wish.op] = (
                    source,
                    wish.source_pages,
                    source.begin_read(wish.source_pages, wish.op),
                )
                self.pools[wish.target, wish.component].begin_write(wish.target_pages, wish.op)
                self.operations.append(wish)
            elif isinstance(wish, commands.QueryStorage) and wish.components_first:
                self.operations.append(wish)
                self.fetched_tokens[wish.op] = self.prompts[wish.request_id]
            elif isinstance(wish, commands.FetchPages):
                self.pools["host", wish.component].begin_write(wish.host_pages, wish.op)
                self.fetched_tokens[wish.op] = self.prompts[wish.request_id]
                self.operations.append(wish)
            elif isinstance(wish, commands.StorePages):
                pool = self.pools["host", wish.component]
                _, tokens = self.rig.core.keys_stored(wish.op)
                pool.expect(wish.host_pages, self.component_tags(wish.component, tokens)[wish.first :], wish.op)
                self.reading[wish.op] = (pool, wish.host_pages, pool.begin_read(wish.host_pages, wish.op))
                self.operations.append(wish)
            elif isinstance(wish, commands.SendPromise):
                tokens = self.prompts[wish.request_id]
                assert [tail.component for tail in wish.component_pages] == list(self.components)
                self.writing[wish.request_id, wish.generation] = (wish.component_pages, tokens)
                for tail in wish.component_pages:
                    assert not tail.pages or tail.first + len(tail.pages) == len(tokens)
                    self.pools["device", tail.component].begin_write(tail.pages, (wish.request_id, wish.generation))
            elif isinstance(wish, commands.ReportReady):
                self.expect_components(wish, self.prompts[wish.request_id])
        self.rig.pending = [wish for wish in self.rig.pending if not is_of_components(wish)]
        super().obey()

    def target(self, room: Sending, span: int) -> tuple[SimulatedPool, list[int]]:
        component = room.components.get(span, "full")
        if component == "full":
            return super().target(room, span)
        return self.pools["device", component], self.component_tags(component, self.prompts[room.key[0]])

    def expect_components(self, ready: commands.ReportReady, tokens: bytes) -> None:
        for table in ready.component_pages:
            component, pool = self.components[table.component], self.pools["device", table.component]
            assert table.first == component.needed_from(len(tokens), 1)
            assert table.first + len(table.pages) == len(tokens)
            pool.expect(table.pages, self.component_tags(table.component, tokens)[table.first :], ready.request_id)
            assert pool.pool.holds(table.own, PageState.OWNED)
            assert len(table.own) >= component.live_pages(1)
            shared = page_ids(page for page in table.pages if page not in table.own)
            assert pool.pool.holds(shared, PageState.CACHED)
            assert not shared or component.is_shared

    @precondition(lambda self: self.operations)
    @rule(pick=PICKS, share=st.sampled_from((0, 1, 2, 99)), fails=st.booleans(), loses=st.booleans())
    def end_operation(self, pick: int, share: int, fails: bool, loses: bool) -> None:
        wish = self.operations[pick % len(self.operations)]
        if not is_of_components(wish):
            super().end_operation(pick, share, fails, loses)
            return
        self.operations.remove(wish)
        if wish.op in self.reading:
            pool, pages, found = self.reading.pop(wish.op)
            pool.end_read(pages, wish.op, found)
        match wish:
            case commands.CopyPages():
                self.pools[wish.target, wish.component].end_write(wish.target_pages, wish.op, None if fails else found)
                self.rig.copied(wish, error="failed" if fails else "")
            case commands.QueryStorage():
                component_pages = tuple(
                    self.stored_component(wish, name, share if loses else 99) for name in wish.components_first
                )
                self.rig.answer(
                    wish, min(share, wish.count), "failed" if fails else "", () if fails else component_pages
                )
            case commands.FetchPages():
                tags = self.component_tags(wish.component, self.fetched_tokens.pop(wish.op))
                wanted = [tags[position] for position in wish.positions]
                here = [tag in self.stored[wish.component] for tag in wanted]
                valid = share if fails else (*here, False).index(False)
                # Pages that were not verified hold garbage in the host pages, at any place of the batch.
                valid = min(valid, len(wanted), (*here, False).index(False))
                pool = self.pools["host", wish.component]
                pool.end_write(wish.host_pages, wish.op, wanted[:valid] + [0] * (len(wanted) - valid))
                self.rig.fetched(wish, valid=valid, error="failed" if fails else "")
            case commands.StorePages():
                count = share if fails else len(found)
                self.stored[wish.component].update(found[:count])
                self.rig.stored(wish, stored=count)
        self.obey()

    def stored_component(self, wish: commands.QueryStorage, name: str, count: int) -> events.StoredComponent:
        """The component pages of the prompt in storage, or the last of them; the answer leaves out any of them."""
        tags = self.component_tags(name, self.fetched_tokens[wish.op])
        here = [at for at, tag in enumerate(tags) if at >= wish.components_first[name] and tag in self.stored[name]]
        return events.StoredComponent(name, tuple((at, at + 1) for at in here[-count:] if count))

    @precondition(lambda self: any(self.stored.values()))
    @rule(pick=PICKS)
    def lose_records(self, pick: int) -> None:
        """Storage evicts one record, which an earlier answer may have listed."""
        name = list(self.stored)[pick % len(self.stored)]
        if self.stored[name]:
            self.stored[name].remove(sorted(self.stored[name])[pick % len(self.stored[name])])

    @rule(pick=PICKS)
    def change_storage(self, pick: int) -> None:
        if pick % 4 == 0:
            self.rig.step(events.StorageChanged, available=pick % 3 > 0, component_pages=pick % 3 > 0)
            self.obey()

    @rule()
    def leave_to_storage(self) -> None:
        """Every ready request finishes, and the caches are emptied: only storage has pages."""
        self.go_on(0, 99)
        while self.ready:
            self.finish(0, b"", False)
        self.go_on(0, 99)
        super().flush(("l1", "l2"))

    # --- More of what leads somewhere, less of what does not ---

    @precondition(lambda self: self.prompts)
    @rule(pick=PICKS, count=st.sampled_from((2, 6, 99)))
    def go_on(self, pick: int, count: int) -> None:
        """Everything in flight succeeds for a while: copies and reads end, prefill writes and reports it."""
        for _ in range(count):
            if self.operations:
                self.end_operation(pick, 99, False, False)
            elif self.unsent():
                self.send_promise(pick, True)
            elif any(room.in_flight for room in self.sendings):
                self.land(pick)
            elif any(room.open_spans() for room in self.sent_rooms()):
                self.post(pick, 99)
            elif any(not room.said_aux for room in self.sent_rooms()):
                self.say_aux(pick)
            else:
                break

    @rule(tokens=st.sampled_from(PAST), count=st.sampled_from((0, 1, 4, 99)))
    def arrive_again(self, tokens: bytes, count: int) -> None:
        """The same few prompts, so that they are found in the caches."""
        if len(self.prompts) < 5:
            self.arrive(tokens, 2, True, False)
            self.go_on(0, count)

    @rule(tiers=st.sampled_from((("l1",), ("l2",))), pick=PICKS)
    def flush(self, tiers: tuple[str, ...], pick: int) -> None:
        if pick % 3 == 0:
            super().flush(tiers)

    @precondition(lambda self: self.rig.core.backups.retracted_requests)
    @rule(pick=PICKS)
    def drop_retracted(self, pick: int) -> None:
        super().drop_retracted(pick)

    # --- What must hold ---

    @invariant()
    def cached_tails_hold_what_their_keys_say(self) -> None:
        if not hasattr(self, "pools"):
            return
        index = self.rig.core.state.components
        for node in index.index.nodes():
            tokens = b"".join(above.edge for above in index.index.path(node))
            for name in self.components:
                tags = self.component_tags(name, tokens)
                for tier in (index.device[name], index.host[name]):
                    for position, page in tier.pages_of(node).items():
                        self.pools[tier.name, name].expect(page_ids([page]), [tags[position]], node)
        for pool in self.pools.values():
            pool.check()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "pools"):
            assert all(pool.is_quiet for pool in self.pools.values())


ComponentsMachine.TestCase.settings = examples(80, stateful_step_count=60, suppress_health_check=list(HealthCheck))
TestComponents = ComponentsMachine.TestCase
