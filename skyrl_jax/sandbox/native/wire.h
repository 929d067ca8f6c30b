/* What the supervisor's two files share. Frames are little-endian: u32 length, then the payload. */
#ifndef SKYRL_WIRE_H
#define SKYRL_WIRE_H

#include <stdint.h>
#include <sys/types.h>

/* Reads exactly n bytes; 0 on success, -1 on end of file or error. */
int read_full(int fd, void *buffer, size_t n);
/* Writes exactly n bytes; 0 on success, -1 on error. */
int write_full(int fd, const void *buffer, size_t n);

/* Unpacks the record stream on fd 0 under `root`; the exit code of the child that runs it. */
int tree_put(const char *root);
/* Writes `path` (file or directory) as a record stream to fd 1; an exit code. */
int tree_get(const char *path);

#endif
