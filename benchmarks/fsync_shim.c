/* A slower disk, and one that counts, for any program: LD_PRELOAD of a library made by
 *
 *     gcc -shared -fPIC -O2 -o fsync_shim.so fsync_shim.c -ldl
 *
 * FSYNC_MS=5    fsync() and fdatasync() take so many milliseconds longer
 * FSYNC_LOG=f   and each adds one byte to the file f, once it is done
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int (*real_fsync)(int);
static int (*real_fdatasync)(int);
static struct timespec pause_of_disk;
static int log_file = -1;

__attribute__((constructor)) static void prepare(void)
{
    const char *milliseconds = getenv("FSYNC_MS");
    const char *path = getenv("FSYNC_LOG");

    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    if (milliseconds != NULL) {
        long long nanoseconds = (long long)(atof(milliseconds) * 1e6);
        pause_of_disk.tv_sec = nanoseconds / 1000000000;
        pause_of_disk.tv_nsec = nanoseconds % 1000000000;
    }
    if (path != NULL)
        log_file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int done(int result)
{
    int saved = errno;
    struct timespec left = pause_of_disk;

    while (nanosleep(&left, &left) == -1 && errno == EINTR)
        ;
    if (log_file >= 0 && write(log_file, ".", 1) != 1)
        abort();
    errno = saved;
    return result;
}

int fsync(int file)
{
    return done(real_fsync(file));
}

int fdatasync(int file)
{
    return done(real_fdatasync(file));
}
