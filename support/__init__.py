"""What the programs stand on."""
import sys

if sys.platform == "win32":
    sys.exit("error: nanotitan runs on Linux, on macOS, and on Windows inside WSL2: wsl --install, and start it there")
