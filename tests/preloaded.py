"""Imported last in the process from which ranks are forked, to make once what each of them would.

transformers builds its table of renamed weights at the first load of a folder, in a third of a
second. Every engine begins and ends with a full garbage collection, which in a fork walks and
thereby copies all objects of the imports, in half a second. It leaves out what exists now.
"""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()
