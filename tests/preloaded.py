"""Imported last in the process from which ranks are forked, to exclude earlier objects from garbage
collections.

Every engine begins and ends with a full collection. In a fork, a collection walks and thereby
copies all objects of the imports, which takes half a second each time.
"""

import gc

gc.collect()
gc.freeze()
