# SPDX-License-Identifier: Apache-2.0
# The probe guest of host.py: a boot sector that does what a kernel does first (protected mode, iret, page tables,
# long mode, iret again) and then tells QEMU's isa-debug-exit device that it got there. Half-working KVM runs real
# mode well and hangs in one of the later ones. To make host.PROBE of it:
#   as probe.S -o probe.o && ld -Ttext 0x7c00 --oformat binary -o probe.bin probe.o
.code16
.globl _start
_start:
    cli
    xorw %ax,%ax
    movw %ax,%ds
    movw %ax,%es
    movw %ax,%ss
    movw $0x7c00,%sp
    # page tables at 0x1000: PML4 -> 0x2000 PDPT -> 0x3000 PD, one 2 MiB page
    cld
    movw $0x1000,%di
    movw $0x1800,%cx
    rep stosw
    movw $0x2003,0x1000
    movw $0x3003,0x2000
    movw $0x0083,0x3000
    lgdt gdtr
    movl %cr0,%eax
    orb $1,%al
    movl %eax,%cr0
    ljmp $0x08,$prot
.code32
prot:
    movw $0x10,%ax
    movw %ax,%ds
    movw %ax,%ss
    movl $0x7c00,%esp
    pushfl
    pushl $0x08
    pushl $back
    iretl
back:
    movl %cr4,%eax
    orb $0x20,%al
    movl %eax,%cr4
    movl $0x1000,%eax
    movl %eax,%cr3
    movl $0xc0000080,%ecx
    rdmsr
    orb $1,%ah
    wrmsr
    movl %cr0,%eax
    orl $0x80000000,%eax
    movl %eax,%cr0
    ljmp $0x18,$long
.code64
long:
    movw $0x10,%ax
    movw %ax,%ss
    pushq $0x10
    pushq $0x7c00
    pushfq
    pushq $0x18
    pushq $done
    iretq
done:
    movw $0xf4,%dx
    movb $0x10,%al
    outb %al,%dx
halt: hlt
    jmp halt
.align 8
gdt: .quad 0
 .quad 0x00cf9a000000ffff
 .quad 0x00cf92000000ffff
 .quad 0x00af9a000000ffff
gdtr: .word 31
 .long gdt
.org 510
.word 0xaa55
