#!/bin/sh
# A guest on a disk that polypath serves. The guest's memory must be shared. SOCKET and IMAGE of a kernel come from outside.
exec qemu-system-x86_64 -nodefaults -nographic -machine q35 -m 512M -smp 2 \
    -object memory-backend-memfd,id=mem,size=512M,share=on -numa node,memdev=mem \
    -chardev "socket,id=disk0,path=${SOCKET:-/run/polypath/disk0.sock},reconnect=1" \
    -device vhost-user-blk-pci,chardev=disk0,num-queues=2 \
    "$@"
