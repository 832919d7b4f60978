// The sandbox process of every pod: it holds the pod's namespaces, reaps orphans where it is PID 1 of a
// shared PID namespace, and ends at once when told to.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void on_stop(int signal_number) {
  (void)signal_number;
  _exit(0);
}

static void on_child(int signal_number) {
  (void)signal_number;
  while (waitpid(-1, 0, WNOHANG) > 0) {
  }
}

int main(void) {
  struct sigaction stop = {.sa_handler = on_stop};
  struct sigaction child = {.sa_handler = on_child, .sa_flags = SA_NOCLDSTOP | SA_RESTART};
  if (sigaction(SIGINT, &stop, 0) || sigaction(SIGTERM, &stop, 0) || sigaction(SIGCHLD, &child, 0)) {
    return 1;
  }
  for (;;) {
    pause();
  }
}
