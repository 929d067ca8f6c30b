/* Whole reads and writes. */
#include <errno.h>
#include <unistd.h>

#include "wire.h"

int read_full(int fd, void *buffer, size_t n) {
    for (char *at = buffer; n;) {
        ssize_t got = read(fd, at, n);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return -1;
        at += got, n -= got;
    }
    return 0;
}

int write_full(int fd, const void *buffer, size_t n) {
    for (const char *at = buffer; n;) {
        ssize_t done = write(fd, at, n);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return -1;
        at += done, n -= done;
    }
    return 0;
}
