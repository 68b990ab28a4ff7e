from shoal.protocol.live.lean import import_without_contents

import_without_contents("hivemind")  # before anything here imports a part of it
