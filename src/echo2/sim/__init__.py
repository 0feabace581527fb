"""The simulated driver: the production planner, relay and ledger under a virtual clock, random links and random faults.

No decisions are made here: `head`, `fleet` and `learner` only carry out the commands of `control/` and report events to
it. The same scenario and seed give the same events, commands and report.
"""

from echo2.sim.report import Report
from echo2.sim.run import run_scenario
from echo2.sim.scenario import Scenario
from echo2.sim.study import Case, Study, load_study

__all__ = ["Case", "Report", "Scenario", "Study", "load_study", "run_scenario"]
