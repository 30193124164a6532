#include "batch_norm.h"

NM_BATCH_NORM(float, float32)
