#!/bin/sh
# Puts an OpenSSH server and rsync into a folder, for the tests: nothing is installed, no root is needed.
# usage: tools.sh DIR. Where the system has both, or there is no apt, the folder stays empty (and tests may be skipped).
set -eu
mkdir -p "$1"
cd "$1"
PATH="$PATH:/usr/sbin"
if command -v sshd >/dev/null && command -v rsync >/dev/null; then exit 0; fi
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
  echo "no sshd, no rsync and no apt here: tests over SSH are skipped" >&2
  exit 0
fi
mkdir -p lists/partial cache/archives/partial
apt="-qq -o Dir::State::Lists=$PWD/lists -o Dir::Cache=$PWD/cache -o APT::Sandbox::User= -o Debug::NoLocking=1"
# shellcheck disable=SC2086
if apt-get $apt update && apt-get $apt download openssh-server rsync libwrap0 libpopt0; then
  for package in *.deb; do dpkg -x "$package" .; done
else
  echo "apt cannot fetch openssh-server and rsync: tests over SSH are skipped" >&2
fi
rm -rf lists cache ./*.deb
