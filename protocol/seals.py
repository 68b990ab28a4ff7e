"""Groups the functions that sign and check envelopes, plans and statements in one replaceable object.

`sim/trust.py` replaces this object in simulations of a thousand peers, where signatures would only cost time. Code that
listens to a real network must use `SEALS`.
"""

from shoal.protocol.envelope import seal, unseal
from shoal.protocol.plan import open_plan
from shoal.protocol.statement import sign_statement, statement_holds


class Seals:
    """Signs and checks with real cryptography. A subclass may replace each function."""

    seal = staticmethod(seal)
    unseal = staticmethod(unseal)
    open_plan = staticmethod(open_plan)
    sign_statement = staticmethod(sign_statement)
    statement_holds = staticmethod(statement_holds)


SEALS = Seals()
