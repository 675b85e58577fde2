/* SPDX-License-Identifier: Apache-2.0 */
/* Sends what stands on its standard input as Ethernet frames, each after its length in two bytes (big endian):
   send_frames DEVICE < FRAMES. For test_network_security.py, which runs it inside a guest that forges. */
#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <stdio.h>
#include <sys/socket.h>

int main(int count, char **words) {
    struct sockaddr_ll to = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
    unsigned char length[2], frame[2048];
    int out = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL));

    if (count != 2 || out < 0 || (to.sll_ifindex = if_nametoindex(words[1])) == 0) {
        perror("send_frames DEVICE");
        return 2;
    }
    while (fread(length, 1, 2, stdin) == 2) {
        size_t size = length[0] << 8 | length[1];
        if (size > sizeof frame || fread(frame, 1, size, stdin) != size ||
            sendto(out, frame, size, 0, (struct sockaddr *)&to, sizeof to) != (ssize_t)size) {
            perror("send_frames");
            return 1;
        }
    }
    return 0;
}
