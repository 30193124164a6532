#include "batch_norm.h"

NM_BATCH_NORM(nm::bfloat16, bfloat16)
