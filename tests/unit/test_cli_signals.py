import subprocess
import sys

LATE = """
import signal, threading, time
from cluster.cli.signals import wake_main_thread

def interrupt():
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

wake_main_thread()
threading.Thread(target=interrupt).start()
try:
    threading.Event().wait()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_signal_that_another_thread_receives_ends_a_wait_of_the_main_thread():
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("interrupted\n", "")
