from my_ops._segment_sum import segment_sum as segment_sum
