"""The durable record of every training group, and the scored groups that wait for the learner."""

from echo2.buffer.audit import Audit, audit
from echo2.buffer.ledger import Ledger
from echo2.buffer.records import GroupRecord, LeaseRecord, LedgerState

__all__ = ["Audit", "GroupRecord", "LeaseRecord", "Ledger", "LedgerState", "audit"]
