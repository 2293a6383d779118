/* How the parts without Python tell what went wrong: by fault, as orchestrator/errors.py sorts it. */
#ifndef SEQSTATE_OUTCOME_H
#define SEQSTATE_OUTCOME_H

#include <stdbool.h>

enum fault {
    FAULT_NONE,
    FAULT_ARGUMENT,  /* InvalidArgument: nothing was changed */
    FAULT_REFUSED,   /* StateRefused with `field` */
    FAULT_FULL,      /* PoolFull */
    FAULT_BACKEND,   /* BackendError */
    FAULT_SYSTEM,    /* OSError with `error_number` */
    FAULT_NO_MEMORY, /* MemoryError */
};

struct outcome {
    enum fault fault;
    int error_number;
    const char *field; /* a string literal */
    char text[512];
};

/* Records a fault and returns false, so that a check reads `return fail(...)`. */
__attribute__((format(printf, 4, 5))) bool fail(struct outcome *outcome, enum fault fault,
                                                const char *field, const char *format, ...);

#endif
