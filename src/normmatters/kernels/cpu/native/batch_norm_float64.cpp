#include "batch_norm.h"

NM_BATCH_NORM(double, float64)
