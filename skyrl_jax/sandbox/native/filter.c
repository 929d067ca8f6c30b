/* The system calls that a sandbox's commands may not make (seccomp, classic BPF).
 *
 * Commands run untrusted text on the host's kernel. What is refused here needs a privilege that no
 * command has, or opens parts of the kernel that escapes have come through and that compilers, test
 * suites and package managers never use: EPERM, or ENOSYS where programs then fall back (clone3:
 * its flags lie behind a pointer, so it cannot be looked into; glibc then uses clone).
 *
 *   new namespaces (clone, unshare with CLONE_NEW*), setns   a user namespace gives back capabilities
 *   mount, umount, pivot_root and the new mount calls        as above
 *   bpf, perf_event_open, userfaultfd, io_uring              kernel attack surface
 *   keyctl, add_key, request_key                             keyrings are not in a namespace
 *   kernel modules, kexec, reboot, swap, clocks, quotas ...  the host's own
 *   open_by_handle_at, name_to_handle_at                     files outside the sandbox's root
 *   AF_VSOCK                                                 reaches the machine's own host past
 *                                                            any network namespace
 *   TIOCSTI                                                  types into a terminal
 *   calls of another architecture or of x32                  numbers that this table does not know
 */
#define _GNU_SOURCE
#include "filter.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
#define NATIVE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define NATIVE AUDIT_ARCH_AARCH64
#else
#error "name this architecture's AUDIT_ARCH_ constant here"
#endif

#ifndef AF_VSOCK
#define AF_VSOCK 40
#endif
#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x00000080
#endif
#define NEW_NAMESPACES                                                                            \
    (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | \
     CLONE_NEWNET)

#define REFUSED SECCOMP_RET_ERRNO | EPERM
#define UNKNOWN SECCOMP_RET_ERRNO | ENOSYS
#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define ANSWER(value) BPF_STMT(BPF_RET | BPF_K, value)
/* Two instructions: the call `name` gets `value`. */
#define CALL(name, value)                                                                         \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), ANSWER(value)
/* Five: of the call `name`, what holds of its argument's low half (the kernel reads an int there). */
#define CALL_IF(name, number, test, operand)                                                      \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 4), LOAD(args[number]),                    \
        BPF_JUMP(BPF_JMP | test | BPF_K, operand, 0, 1), ANSWER(REFUSED), ANSWER(SECCOMP_RET_ALLOW)

static struct sock_filter table[] = {
    LOAD(arch),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, NATIVE, 1, 0),
    ANSWER(REFUSED),
    LOAD(nr),
#if defined(__x86_64__)
    BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1),
    ANSWER(UNKNOWN),
#endif
    CALL_IF(clone, 0, BPF_JSET, NEW_NAMESPACES),
    CALL_IF(unshare, 0, BPF_JSET, NEW_NAMESPACES | CLONE_NEWTIME),
    CALL_IF(socket, 0, BPF_JEQ, AF_VSOCK),
    CALL_IF(ioctl, 1, BPF_JEQ, TIOCSTI),
#ifdef SYS_clone3
    CALL(clone3, UNKNOWN),
#endif
    CALL(setns, REFUSED),
    CALL(mount, REFUSED),
    CALL(umount2, REFUSED),
    CALL(pivot_root, REFUSED),
    CALL(chroot, REFUSED),
#ifdef SYS_open_tree
    CALL(open_tree, REFUSED),
    CALL(move_mount, REFUSED),
    CALL(fsopen, REFUSED),
    CALL(fsconfig, REFUSED),
    CALL(fsmount, REFUSED),
    CALL(fspick, REFUSED),
#endif
#ifdef SYS_mount_setattr
    CALL(mount_setattr, REFUSED),
#endif
    CALL(bpf, REFUSED),
    CALL(perf_event_open, REFUSED),
    CALL(userfaultfd, REFUSED),
#ifdef SYS_io_uring_setup
    CALL(io_uring_setup, UNKNOWN),
    CALL(io_uring_enter, UNKNOWN),
    CALL(io_uring_register, UNKNOWN),
#endif
    CALL(keyctl, REFUSED),
    CALL(add_key, REFUSED),
    CALL(request_key, REFUSED),
    CALL(init_module, REFUSED),
    CALL(finit_module, REFUSED),
    CALL(delete_module, REFUSED),
    CALL(kexec_load, REFUSED),
    CALL(reboot, REFUSED),
    CALL(swapon, REFUSED),
    CALL(swapoff, REFUSED),
    CALL(acct, REFUSED),
    CALL(quotactl, REFUSED),
    CALL(settimeofday, REFUSED),
    CALL(clock_settime, REFUSED),
    CALL(adjtimex, REFUSED),
    CALL(sethostname, REFUSED),
    CALL(setdomainname, REFUSED),
    CALL(syslog, REFUSED),
    CALL(open_by_handle_at, REFUSED),
    CALL(name_to_handle_at, REFUSED),
    CALL(lookup_dcookie, REFUSED),
#if defined(__x86_64__)
    CALL(iopl, REFUSED),
    CALL(ioperm, REFUSED),
    CALL(modify_ldt, REFUSED),
#endif
    ANSWER(SECCOMP_RET_ALLOW),
};

int install_filter(void) {
    struct sock_fprog program = {sizeof table / sizeof *table, table};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}
