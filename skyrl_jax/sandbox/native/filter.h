/* The system calls that a sandbox's commands may not make. */
#ifndef FILTER_H
#define FILTER_H

/* Install the filter in this process for good; needs no_new_privs. 0, or -1 with errno. */
int install_filter(void);

#endif
