#define _GNU_SOURCE
#include "durable.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* More than 2 GiB in one call is cut by the kernel anyway. */
static const size_t MOST_PER_CALL = (size_t)1 << 30;

static bool system_failure(struct outcome *outcome)
{
    outcome->error_number = errno;
    return fail(outcome, FAULT_SYSTEM, NULL, "%s", "");
}

static bool write_all(int file, const uint8_t *bytes, size_t n_bytes)
{
    while (n_bytes > 0) {
        size_t wanted = n_bytes < MOST_PER_CALL ? n_bytes : MOST_PER_CALL;
        ssize_t written = write(file, bytes, wanted);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written < 0) {
            return false;
        }
        bytes += written;
        n_bytes -= (size_t)written;
    }
    return true;
}

/* Makes the rename itself durable. `path` is shortened to its folder. */
static bool flush_folder(char *path)
{
    char *slash = strrchr(path, '/');
    const char *folder = ".";
    if (slash == path) {
        folder = "/";
    } else if (slash != NULL) {
        *slash = '\0';
        folder = path;
    }
    int file = open(folder, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        return false;
    }
    bool flushed = fsync(file) == 0;
    int error_number = errno;
    close(file);
    errno = error_number;
    return flushed;
}

bool durable_replace(const char *path, const uint8_t *bytes, size_t n_bytes,
                     struct outcome *outcome)
{
    bool done = false;
    int file = -1;
    size_t room = strlen(path) + sizeof ".XXXXXX";
    char *temporary = malloc(room);

    if (temporary == NULL) {
        return fail(outcome, FAULT_NO_MEMORY, NULL, "no memory for a path");
    }
    snprintf(temporary, room, "%s.XXXXXX", path);
    file = mkostemp(temporary, O_CLOEXEC);
    if (file < 0) {
        system_failure(outcome);
        goto end;
    }
    if (!write_all(file, bytes, n_bytes) || fsync(file) != 0 || rename(temporary, path) != 0) {
        system_failure(outcome);
        unlink(temporary);
        goto end;
    }
    done = flush_folder(temporary) || system_failure(outcome);
end:
    if (file >= 0) {
        close(file);
    }
    free(temporary);
    return done;
}

int durable_open(const char *path, uint64_t *size, struct outcome *outcome)
{
    struct stat about;
    /* O_NONBLOCK: to open a pipe must not wait for a writer */
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (file < 0) {
        system_failure(outcome);
        return -1;
    }
    if (fstat(file, &about) != 0) {
        system_failure(outcome);
        close(file);
        return -1;
    }
    if (!S_ISREG(about.st_mode)) {
        fail(outcome, FAULT_ARGUMENT, NULL, "path is not a regular file");
        close(file);
        return -1;
    }
    *size = (uint64_t)about.st_size;
    return file;
}

bool durable_read(int file, uint8_t *room, size_t n_bytes, struct outcome *outcome)
{
    while (n_bytes > 0) {
        size_t wanted = n_bytes < MOST_PER_CALL ? n_bytes : MOST_PER_CALL;
        ssize_t n_read = read(file, room, wanted);
        if (n_read < 0 && errno == EINTR) {
            continue;
        }
        if (n_read < 0) {
            return system_failure(outcome);
        }
        if (n_read == 0) {
            errno = EIO;
            return system_failure(outcome);
        }
        room += n_read;
        n_bytes -= (size_t)n_read;
    }
    return true;
}
