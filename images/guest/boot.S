# A boot sector that makes the firmware drive the disk: it reads the sectors behind itself in requests of several sizes,
# checks them, writes a block, reads it back, and tells the serial port how it went.
#
# Every 32-bit word from sector 1 on follows from the one before: x = x * 1664525 + 1013904223, starting behind x = 1.
# The block written at sector WRITE_SECTOR goes on where the sectors read end.

        .set    BUFFER_SEGMENT, 0x1000
        .set    WRITE_SECTOR, 2048
        .set    WRITE_SECTORS, 16
        .set    SERIAL, 0x3f8

        .code16
        .globl  _start
_start: cli
        xorw    %ax, %ax
        movw    %ax, %ds
        movw    %ax, %ss
        movw    $0x7c00, %sp
        sti
        cld
        ljmp    $0, $main
main:   movb    %dl, drive
        movw    $BUFFER_SEGMENT, %ax
        movw    %ax, %es

next:   movw    size_at, %di
        movzbw  (%di), %ax
        testw   %ax, %ax
        jz      reads_done
        incw    size_at
        movw    %ax, count
        movw    $0x4200, %ax
        call    disk
        call    check
        movzwl  count, %eax
        addl    %eax, sector
        jmp     next

reads_done:
        movl    $WRITE_SECTOR, sector
        movw    $WRITE_SECTORS, count
        pushl   value
        movb    $1, fill
        call    check
        movb    $0, fill
        movw    $0x4300, %ax
        call    disk
        xorw    %di, %di
        xorl    %eax, %eax
        movw    $(WRITE_SECTORS * 128), %cx
        rep stosl
        popl    value
        movw    $0x4200, %ax
        call    disk
        call    check
        movw    $good, %si
        jmp     tell

# One request of `count` sectors at `sector`; AH says which kind.
disk:   movw    $packet, %si
        movb    drive, %dl
        int     $0x13
        movw    $failed, %si
        jc      tell
        ret

# Compares the buffer with the next values, or fills it with them.
check:  xorw    %di, %di
        movw    count, %cx
        shlw    $7, %cx
1:      imull   $1664525, value, %eax
        addl    $1013904223, %eax
        movl    %eax, value
        cmpb    $0, fill
        jz      2f
        movl    %eax, %es:(%di)
2:      movw    $differs, %si
        cmpl    %eax, %es:(%di)
        jne     tell
        addw    $4, %di
        loop    1b
        ret

tell:   movw    $(SERIAL + 5), %dx
1:      inb     %dx, %al
        testb   $0x20, %al
        jz      1b
        lodsb
        testb   %al, %al
        jz      halt
        movw    $SERIAL, %dx
        outb    %al, %dx
        jmp     tell
halt:   hlt
        jmp     halt

value:  .long   1
size_at: .word  sizes
sizes:  .byte   1, 7, 8, 16, 32, 127, 0
fill:   .byte   0
drive:  .byte   0
        .balign 4
packet: .byte   16, 0
count:  .word   0
        .word   0, BUFFER_SEGMENT
sector: .long   1, 0

good:   .asciz  "boot sector: all sectors read and written as they should be\r\n"
failed: .asciz  "boot sector: the firmware reports a failed request\r\n"
differs: .asciz "boot sector: wrong data\r\n"

        .org    510
        .word   0xaa55
