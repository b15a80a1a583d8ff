/* Calls that write fail when they are told to, in a folder, in this process: preload it (LD_PRELOAD).

   gcc -O2 -shared -fPIC faults.c -o faults.so -ldl
   faults_begin(folder, kind, at, for_good, error): the at-th call of a kind (from 1) below the folder fails once, or
   that one and all later ones. faults_count(kind): calls so far. faults_list(file): from now on each call is a line of
   that file, its kind and its path. kind: 0 open for writing, 1 write, 2 fsync, 3 rename, 4 unlink. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, WRITE, SYNC, RENAME, UNLINK, KINDS };
static char folder[PATH_MAX];
static int chosen = -1, for_good, error_number;
static long at;
static long counts[KINDS];
static int list = -1;

void faults_begin(const char *path, int kind, long number, int lasting, int error) {
    snprintf(folder, sizeof folder, "%s/", path);
    memset(counts, 0, sizeof counts);
    at = number, for_good = lasting, error_number = error;
    chosen = kind;
}

long faults_count(int kind) { return counts[kind]; }

void faults_list(const char *path) {
    list = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
}

static void listed(int kind, const char *path) {
    char line[PATH_MAX + 20];
    int size = snprintf(line, sizeof line, "%d %s\n", kind, path);
    if (list >= 0 && syscall(SYS_write, list, line, size) != size) abort();
}

static int fails(int kind, const char *path) {
    if (!folder[0] || strncmp(path, folder, strlen(folder))) return 0;
    long number = __sync_add_and_fetch(&counts[kind], 1);
    listed(kind, path);
    if (kind != chosen || !(number == at || (for_good && number > at))) return 0;
    errno = error_number;
    return 1;
}

static int path_fails(int kind, int base, const char *path) {
    char whole[PATH_MAX] = "";
    if (!folder[0]) return 0;
    if (path[0] != '/') {
        char link[40];
        snprintf(link, sizeof link, base == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", base);
        ssize_t size = readlink(link, whole, sizeof whole - 1);
        whole[size < 0 ? 0 : size] = 0;
        strncat(whole, "/", sizeof whole - strlen(whole) - 1);
    }
    strncat(whole, path, sizeof whole - strlen(whole) - 1);
    return fails(kind, whole);
}

static int descriptor_fails(int kind, int file) { return path_fails(kind, file, "."); }

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = dlsym(RTLD_NEXT, #name)

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if ((flags & (O_WRONLY | O_RDWR)) && path_fails(OPEN, AT_FDCWD, path)) return -1; \
        return real(path, flags, mode); \
    }
#define OPENS_AT(name) \
    int name(int base, const char *path, int flags, ...) { \
        REAL(int, name, int, const char *, int, ...); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if ((flags & (O_WRONLY | O_RDWR)) && path_fails(OPEN, base, path)) return -1; \
        return real(base, path, flags, mode); \
    }
#define OPENS_STREAM(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(FILE *, name, const char *, const char *); \
        if (strpbrk(mode, "wa+") && path_fails(OPEN, AT_FDCWD, path)) return NULL; \
        return real(path, mode); \
    }
OPENS(open) OPENS(open64) OPENS_AT(openat) OPENS_AT(openat64) OPENS_STREAM(fopen) OPENS_STREAM(fopen64)

ssize_t write(int file, const void *content, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    return descriptor_fails(WRITE, file) ? -1 : real(file, content, size);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    return descriptor_fails(WRITE, file) ? -1 : real(file, parts, count);
}
ssize_t pwrite(int file, const void *content, size_t size, off_t offset) {
    REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
    return descriptor_fails(WRITE, file) ? -1 : real(file, content, size, offset);
}
ssize_t pwrite64(int file, const void *content, size_t size, off64_t offset) {
    REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t);
    return descriptor_fails(WRITE, file) ? -1 : real(file, content, size, offset);
}
int fsync(int file) {
    REAL(int, fsync, int);
    return descriptor_fails(SYNC, file) ? -1 : real(file);
}
int fdatasync(int file) {
    REAL(int, fdatasync, int);
    return descriptor_fails(SYNC, file) ? -1 : real(file);
}
int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    return path_fails(RENAME, AT_FDCWD, to) ? -1 : real(from, to);
}
int renameat(int base, const char *from, int other, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *);
    return path_fails(RENAME, other, to) ? -1 : real(base, from, other, to);
}
int unlink(const char *path) {
    REAL(int, unlink, const char *);
    return path_fails(UNLINK, AT_FDCWD, path) ? -1 : real(path);
}
int unlinkat(int base, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    return path_fails(UNLINK, base, path) ? -1 : real(base, path, flags);
}
int rmdir(const char *path) {
    REAL(int, rmdir, const char *);
    return path_fails(UNLINK, AT_FDCWD, path) ? -1 : real(path);
}
