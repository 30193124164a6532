#include "batch_norm.h"

NM_BATCH_NORM(nm::float16, float16)
