"""Checks strangers' rollouts on a machine of the run's owner, between the decoding steps of its own sampling."""

from __future__ import annotations

from typing import Any

from echo2.errors import PeerError
from echo2.rollout.verification import PrefillEngine, check_group
from echo2.transport import messages
from echo2.transport import wire_pb2 as wire


async def check(engine: Any, asked: wire.Check) -> wire.CheckReport:
    """Check a group, and return the report for the head.

    Raises:
        PeerError: "oversized" or "malformed": the head's message is not a valid check.
    """
    assignment, group = messages.decode_assignment(asked.lease), messages.parse_group(asked.group)
    if assignment.lease.group != group.group or assignment.prompt_tokens != group.prompt_tokens:
        raise PeerError("malformed", f"{group.group} is to be checked as {assignment.lease.group}")
    report = wire.CheckReport(policy=group.group.policy, number=group.group.number)
    if not isinstance(engine, PrefillEngine):
        report.missed = "this engine gives no distributions of tokens"
        return report
    try:
        verdict = await check_group(engine, messages.decode_ref(asked.ref), assignment, group, asked.is_from_stream)
    except PeerError as error:
        report.missed = str(error)
    else:
        report.num_tokens, report.num_skipped = verdict.num_tokens, verdict.num_skipped
        report.fault, report.surprise, report.variance = verdict.fault, verdict.surprise, verdict.variance
    return report
