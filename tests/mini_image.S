# SPDX-License-Identifier: Apache-2.0
# A guest without an operating system, which boots in a fraction of a second of CPU time.
#
# At the boot it writes to the serial console whether its disk has a canary, and writes one if not:
#     kilonova mini guest: booting
#     vda holds [canary]
#     kilonova mini guest: ready
# Then it counts in memory, reads and writes its disk, and writes a line four times per second:
#     kilonova mini guest: run RUN canary CANARY sectors SECTORS was RUN COUNT count COUNT
# All numbers are hexadecimal. RUN is a random name of the boot. CANARY is the RUN of the first boot
# of the disk, read from the disk each time. SECTORS is the size of the disk at the boot, in units of
# 512 bytes. "was" has RUN and COUNT that the boot before wrote last: 1, 5, 9 and so on. The power
# button turns the guest off.
#
# Assembled by mini_image.py into the first three sectors of a disk, for a BIOS in real mode.

    .code16
    .globl _start
    .equ CANARY_AT, 64 * 2048       # sector, behind the end of the image
    .equ NAME_AT, CANARY_AT + 1
    .equ COUNT_AT, 72 * 2048
    .equ MAGIC, 0x616e6163          # "cana"
    .equ MAGIC_END, 0x7972          # "ry"
    .equ BUFFER, 0x8400
    .equ PARAMETERS, 0x8600
    .equ CONSOLE, 0x3f8
    .equ TICKS, 0x46c               # the BIOS counts 18.2 ticks per second here
    .equ PAUSE, 4                   # ticks between two counts
    .equ POWER_STATUS, 0x600        # the power management of the PIIX4, where SeaBIOS puts it
    .equ POWER_ENABLE, 0x602
    .equ POWER_CONTROL, 0x604
    .equ POWER_BUTTON, 0x100
    .equ POWER_OFF, 0x2000

_start:
    cli
    xorw %ax, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movw $0x7c00, %sp
    ljmp $0, $begin
begin:
    sti
    cld
    movb %dl, drive
    movw $2, sectors                # the rest of this program
    movw $0x7e00, buffer
    movl $1, sector
    movb $0x42, %ah
    call disk
    movw $1, sectors
    movw $BUFFER, buffer
    jmp main

# Read (ah = 0x42) or write (ah = 0x43) the sector of the disk packet.
disk:
    xorb %al, %al
    movb drive, %dl
    movw $packet, %si
    int $0x13
    jc failed
    ret
failed:
    hlt
    jmp failed

drive:   .byte 0
    .balign 4
packet:  .byte 16, 0
sectors: .word 0
buffer:  .word 0, 0
sector:  .long 0, 0

    .org 510
    .word 0xaa55

main:
    movw $POWER_ENABLE, %dx
    movw $POWER_BUTTON, %ax
    outw %ax, %dx
    # The time stamp counter and the seconds of the clock name this boot.
    movb $0, %al
    outb %al, $0x70
    inb $0x71, %al
    movb %al, %bl
    rdtsc
    shll $24, %ebx
    xorl %ebx, %eax
    movl %eax, run
    # The size of the disk
    movw $0x1e, PARAMETERS
    movw $PARAMETERS, %si
    movb drive, %dl
    movb $0x48, %ah
    int $0x13
    movw $text_booting, %si
    call say_text
    movl $CANARY_AT, sector
    movb $0x42, %ah
    call disk
    movw $text_vda, %si
    call say_text
    cmpl $MAGIC, BUFFER
    je kept
    movw $text_none, %si
    call say_text
    movl $MAGIC, BUFFER
    movl $MAGIC_END, BUFFER + 4
    movb $0x43, %ah
    call disk
    movl $NAME_AT, sector
    movl run, %eax
    movl %eax, BUFFER + 4
    movb $0x43, %ah
    call disk
    jmp known
kept:
    movw $text_canary_there, %si
    call say_text
known:
    movw $text_ready, %si
    call say_text
    # What the boot before wrote
    movl $COUNT_AT, sector
    movb $0x42, %ah
    call disk
    movl BUFFER + 4, %eax
    movl %eax, was_run
    movl BUFFER + 8, %eax
    movl %eax, was_count

again:
    incl count
    movb count, %al
    andb $3, %al
    cmpb $1, %al                    # 1, 5, 9 and so on
    jne unwritten
    movl $COUNT_AT, sector
    movl $MAGIC, BUFFER
    movl run, %eax
    movl %eax, BUFFER + 4
    movl count, %eax
    movl %eax, BUFFER + 8
    movb $0x43, %ah
    call disk
unwritten:
    movl $NAME_AT, sector
    movb $0x42, %ah
    call disk
    movw $text_run, %si
    movl run, %eax
    call say
    movw $text_canary, %si
    movl BUFFER + 4, %eax
    call say
    movw $text_sectors, %si
    movl PARAMETERS + 16, %eax
    call say
    movw $text_was, %si
    movl was_run, %eax
    call say
    movw $text_space, %si
    movl was_count, %eax
    call say
    movw $text_count, %si
    movl count, %eax
    call say
    movb $'\r', %al
    call say_byte
    movb $'\n', %al
    call say_byte
    movw TICKS, %bx
pause:
    hlt
    movw $POWER_STATUS, %dx
    inw %dx, %ax
    testw $POWER_BUTTON, %ax
    jnz power_off
    movw TICKS, %ax
    subw %bx, %ax
    cmpw $PAUSE, %ax
    jb pause
    jmp again
power_off:
    movw $POWER_CONTROL, %dx
    movw $POWER_OFF, %ax
    outw %ax, %dx
    jmp pause

# Write the text at si, which ends with a zero.
say_text:
    lodsb
    testb %al, %al
    jz said
    call say_byte
    jmp say_text
said:
    ret

# Write the text at si, which ends with a zero, and eax as eight hexadecimal digits to the console.
say:
    movl %eax, %ecx
letter:
    lodsb
    testb %al, %al
    jz number
    call say_byte
    jmp letter
number:
    movb $8, digits
next:
    roll $4, %ecx
    movb %cl, %al
    andb $15, %al
    addb $'0', %al
    cmpb $'9', %al
    jbe digit
    addb $'a' - '9' - 1, %al
digit:
    call say_byte
    decb digits
    jnz next
    ret

# Write the byte in al when the console takes it.
say_byte:
    movb %al, %ah
    movw $CONSOLE + 5, %dx
full:
    inb %dx, %al
    testb $0x20, %al
    jz full
    movb %ah, %al
    movw $CONSOLE, %dx
    outb %al, %dx
    ret

digits: .byte 0
    .balign 4
run:       .long 0
count:     .long 0
was_run:   .long 0
was_count: .long 0
text_booting: .asciz "kilonova mini guest: booting\r\n"
text_ready:   .asciz "kilonova mini guest: ready\r\n"
text_vda:     .asciz "vda holds ["
text_none:    .asciz "]\r\n"
text_canary_there: .asciz "canary]\r\n"
text_run:     .asciz "kilonova mini guest: run "
text_canary:  .asciz " canary "
text_sectors: .asciz " sectors "
text_was:     .asciz " was "
text_space:   .asciz " "
text_count:   .asciz " count "
    .org 1536
