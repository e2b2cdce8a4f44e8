"""Imported last in the process that ranks are forked from: what it has by now is left out of all collections.

An engine begins and ends with a full one. In a fork that walks, and thereby copies, all that the imports have made:
half a second each time.
"""

import gc

gc.collect()
gc.freeze()
