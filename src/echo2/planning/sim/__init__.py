"""The simulator: the production planner, relay and ledger under a virtual clock, random links and random faults.

No decisions are made here: `head`, `fleet` and `learner` only carry out the commands of the deciders and report events
to them. The same scenario and seed give the same events, commands and report.
"""
