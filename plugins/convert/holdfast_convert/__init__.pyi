# The public names and where they are; `lazy_loader` imports each when it is first used.

from .conversion import Conversion as Conversion
from .conversion import convert as convert
