from shoal.protocol.live.lean import import_lazily

import_lazily("scipy.optimize")  # before anything here imports hivemind
