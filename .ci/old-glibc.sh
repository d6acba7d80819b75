#!/usr/bin/env bash
# Prepares a C compiler and linker, `cc`, whose programs run with glibc 2.31 and later, whatever this system has. Prints
# `export PATH=…`, with which cargo and maturin use it: eval "$(.ci/old-glibc.sh)".
#
# They are this system's, with the C library of the release of Debian or Ubuntu that has glibc 2.31; libstdc++ is linked
# statically. LLVM's libraries, compiled for a later glibc, need three functions and variables that 2.31 lacks: those are below.
set -euo pipefail
cd "$(dirname "$0")/.."

HOME_DIR=$PWD/target/glibc-2.31
SYSROOT=$HOME_DIR/root

note() { echo "old-glibc: $*" >&2; }

# Downloads the packages of the C library with its headers, with apt's own means but none of its state.
fetch() {
    local id release keyring mirror options package
    command -v apt-get >/dev/null || { note "needs Debian or Ubuntu: the C library is taken from their packages"; return 1; }
    id=$(sed -n 's/^ID=//p' /etc/os-release)
    case $id in
    debian) release=bullseye keyring=/usr/share/keyrings/debian-archive-keyring.gpg ;;
    ubuntu) release=focal keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg ;;
    *) note "knows the releases of Debian and Ubuntu only, not of $id"; return 1 ;;
    esac
    # That of the release itself: the codenames of its updates have a dash.
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(CODENAME) $(REPO_URI)' | sed -n "s/^$id [a-z]* //Ip" | head -n 1)
    [[ -n $mirror ]] || { note "apt names no mirror of $id; run apt-get update first"; return 1; }
    rm -rf "$HOME_DIR/apt"
    mkdir -p "$HOME_DIR/apt/lists/partial" "$HOME_DIR/apt/cache/archives/partial"
    : >"$HOME_DIR/apt/status"
    echo "deb [signed-by=$keyring] $mirror $release main" >"$HOME_DIR/apt/sources.list"
    options=(
        -qq -o "Dir::Etc::SourceList=$HOME_DIR/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$HOME_DIR/apt/lists" -o "Dir::State::status=$HOME_DIR/apt/status"
        -o "Dir::Cache=$HOME_DIR/apt/cache" -o Acquire::Languages=none
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false -o APT::Sandbox::User=
    )
    apt-get "${options[@]}" update >&2
    (cd "$HOME_DIR/apt" && apt-get "${options[@]}" download libc6 libc6-dev linux-libc-dev >&2)
    rm -rf "$SYSROOT.part"
    for package in "$HOME_DIR"/apt/*.deb; do
        dpkg-deb -x "$package" "$SYSROOT.part"
    done
    # Absolute links lead out of it.
    find "$SYSROOT.part" -type l -lname '/*' -printf '%p %l\n' | while read -r link to; do
        ln -sfr "$SYSROOT.part$to" "$link"
    done
    rm -rf "$HOME_DIR/apt"
    mv "$SYSROOT.part" "$SYSROOT"
}

[[ -d $SYSROOT ]] || fetch
mkdir -p "$HOME_DIR/bin" "$HOME_DIR/lib"
compiler=$(PATH=${PATH//"$HOME_DIR/bin:"/} command -v gcc) || { note "needs gcc"; exit 1; }
libstdcxx=$("$compiler" -print-file-name=libstdc++.a)
[[ -e $libstdcxx ]] || { note "needs libstdc++.a, of the package libstdc++-dev"; exit 1; }
ln -sf "$libstdcxx" "$HOME_DIR/lib/libstdc++.a"

cat >"$HOME_DIR/lib/later.c" <<'C'
/* What the objects of LLVM and libstdc++ use of a later glibc. */
#include <malloc.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>

/* 2.32: whether the process has one thread. With 0, reference counts are always atomic. */
char __libc_single_threaded = 0;

/* 2.33: mallinfo with wide fields, for LLVM's statistics of memory. */
struct mallinfo2 {
    size_t arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks, fordblks, keepcost;
};
struct mallinfo2 mallinfo2(void) {
    struct mallinfo m = mallinfo();
    struct mallinfo2 wide = {
        (unsigned)m.arena, (unsigned)m.ordblks, (unsigned)m.smblks, (unsigned)m.hblks, (unsigned)m.hblkhd,
        (unsigned)m.usmblks, (unsigned)m.fsmblks, (unsigned)m.uordblks, (unsigned)m.fordblks, (unsigned)m.keepcost,
    };
    return wide;
}

/* 2.36: for std::random_device. */
uint32_t arc4random(void) {
    uint32_t x;
    if (getrandom(&x, sizeof x, 0) != sizeof x)
        abort();
    return x;
}
C
"$compiler" --sysroot="$SYSROOT" -O2 -fPIC -fvisibility=hidden -c "$HOME_DIR/lib/later.c" -o "$HOME_DIR/lib/later.o"

# The C library comes first among the libraries, and what it lacks last. This system's libgcc_s may need a later glibc; the one
# of the system that the program runs on does not. Nothing is linked by -c, -S and -E.
cat >"$HOME_DIR/bin/cc" <<SH
#!/bin/sh
for argument; do
    case \$argument in
    -c | -S | -E) exec $compiler --sysroot=$SYSROOT "\$@" ;;
    esac
done
exec $compiler --sysroot=$SYSROOT -L$HOME_DIR/lib -L$SYSROOT/usr/lib/x86_64-linux-gnu -L$SYSROOT/lib/x86_64-linux-gnu \\
    "\$@" $HOME_DIR/lib/later.o -lpthread -ldl -lm -Wl,--allow-shlib-undefined
SH
chmod +x "$HOME_DIR/bin/cc"
ln -sf cc "$HOME_DIR/bin/gcc"
echo "export PATH=$HOME_DIR/bin:$PATH"
