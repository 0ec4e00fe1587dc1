#!/bin/sh
# A guest on a disk that polypath serves. The guest's memory must be shared; there are at most as many queues as CPUs.
exec cloud-hypervisor --kernel "${KERNEL:-/usr/share/cloud-hypervisor/hypervisor-fw}" \
    --cpus boot=2 --memory size=512M,shared=on \
    --disk "vhost_user=on,socket=${SOCKET:-/run/polypath/disk0.sock},num_queues=2,queue_size=128" \
    "$@"
