"""The loop of the agent under a clock that the test turns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_gpu_provider import __version__
from airflow_gpu_provider.exceptions import BrokerUnavailable, IdentityRefused
from airflow_gpu_provider.inventory.agent import MAX_BACKOFF_S, Agent
from airflow_gpu_provider.inventory.artifacts import ArtifactShelf
from airflow_gpu_provider.inventory.fleet_spec import parse_fleet
from airflow_gpu_provider.inventory.probe import NO_LEASES, Leases
from airflow_gpu_provider.inventory.simulated import SimulatedProbe, simulated_id
from airflow_gpu_provider.reports import LeasedDevice, NodeReport, ReportAnswer, ReportBody


class World:
    """A clock, a broker and the times at which it was asked."""

    def __init__(self, *, report_s: float = 0.1, steps: int = 10) -> None:
        self.now = 1000.0
        self.report_s = report_s
        self.steps = steps
        self.bodies: list[ReportBody] = []
        self.times: list[float] = []
        self.waits: list[float] = []
        self.answer: Callable[[int], ReportAnswer] = lambda _step: ReportAnswer()

    def clock(self) -> float:
        return self.now

    def report(self, body: ReportBody) -> ReportAnswer:
        self.bodies.append(body)
        self.times.append(self.now)
        self.now += self.report_s
        return self.answer(len(self.bodies))

    def wait(self, seconds: float) -> bool:
        assert seconds >= 0
        self.waits.append(seconds)
        self.now += seconds
        return len(self.waits) >= self.steps

    def gaps(self) -> list[float]:
        return [round(b - a, 3) for a, b in zip(self.times, self.times[1:], strict=False)]


def agent_in(world: World, text: str = "2xA100", interval_s: float | None = None) -> Agent:
    probe = SimulatedProbe(parse_fleet(text, base_name="host"), host_name="host")
    return Agent(probe, world.report, clock=world.clock, interval_s=interval_s)


def down(first: int, last: int) -> Callable[[int], ReportAnswer]:
    def answer(step: int) -> ReportAnswer:
        if first <= step <= last:
            raise BrokerUnavailable("Devices not reported: connection refused.")
        return ReportAnswer()

    return answer


def test_the_pace_is_once_a_second_whatever_a_report_takes() -> None:
    world = World(report_s=0.4)
    agent_in(world).run(world.wait)
    assert world.gaps() == [1.0] * 9
    assert world.bodies[0].nodes[0].agent_version == __version__


def test_a_missed_slot_is_skipped_and_not_made_up_for() -> None:
    world = World(steps=6)

    def slow_once(step: int) -> ReportAnswer:
        world.now += 3.7 if step == 2 else 0.0
        return ReportAnswer()

    world.answer = slow_once
    agent_in(world).run(world.wait)
    assert world.gaps() == [1.0, 3.8, 1.0, 1.0, 1.0]


def test_the_brokers_pace_is_followed_unless_one_was_given() -> None:
    for interval_s, gap in ((None, 2.5), (0.5, 0.5)):
        world = World(steps=4)
        world.answer = lambda _step: ReportAnswer(report_interval_s=2.5)
        agent_in(world, interval_s=interval_s).run(world.wait)
        assert world.gaps() == [gap] * 3


def test_artifacts_are_told_once_and_again_after_an_outage(tmp_path: Path) -> None:
    (tmp_path / "gpt2").write_text("weights")
    world = World(report_s=0.0, steps=6)
    world.answer = down(1, 2)
    probe = SimulatedProbe(parse_fleet("2xA100", base_name="host"), host_name="host")
    Agent(probe, world.report, clock=world.clock, shelf=ArtifactShelf([str(tmp_path)])).run(world.wait)
    told = [body.nodes[0].artifacts for body in world.bodies]
    assert told == [(str(tmp_path / "gpt2"),)] * 3 + [None] * 3


def test_the_next_report_knows_the_leases_of_the_last_answer() -> None:
    world = World(steps=2)
    leased = LeasedDevice(id=simulated_id("host", "host", 1), lease_id="lease-1")
    world.answer = lambda _step: ReportAnswer(leased=[leased])
    agent_in(world).run(world.wait)
    before, after = (body.nodes[0].devices for body in world.bodies)
    assert [device.utilisation for device in before] == [0.0, 0.0]
    assert [bool(device.utilisation) for device in after] == [False, True]


def test_an_outage_is_two_lines_and_pauses_that_stay_short(caplog: pytest.LogCaptureFixture) -> None:
    world = World(report_s=0.0, steps=14)
    world.answer = down(3, 10)
    with caplog.at_level(logging.INFO):
        agent_in(world).run(world.wait)
    assert world.gaps() == [1.0, 1.0, 1.0, 2.0, 4.0, *[MAX_BACKOFF_S] * 5, 1.0, 1.0, 1.0]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "connection refused" in caplog.messages[0]
    assert "answers again after 32 s (8 failed tries)" in caplog.messages[1]


def test_a_refused_token_ends_the_loop() -> None:
    world = World()

    def refuse(_step: int) -> ReportAnswer:
        raise IdentityRefused("no")

    world.answer = refuse
    with pytest.raises(IdentityRefused):
        agent_in(world).run(world.wait)
    assert world.waits == []


def test_a_probe_that_fails_reports_nothing_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    class Flaky:
        reads = 0

        def read(self, leases: Leases = NO_LEASES) -> tuple[NodeReport, ...]:
            self.reads += 1
            if self.reads in (2, 3):
                raise RuntimeError("the driver hangs")
            return ()

    world = World(steps=5)
    Agent(Flaky(), world.report, clock=world.clock).run(world.wait)
    assert len(world.bodies) == 3
    assert caplog.text.count("could not be measured") == 1


def test_labels_of_the_command_line_are_told_beside_those_of_the_probe() -> None:
    world = World(steps=1)
    probe = SimulatedProbe(parse_fleet("1xA100", base_name="host"), host_name="host")
    labels = {"rack": "r1", "simulated": "no"}
    agent = Agent(probe, world.report, clock=world.clock, labels=labels)
    (node,) = agent.measure().nodes
    assert node.labels == {"rack": "r1", "simulated": "true"}, "what was measured stays true"
